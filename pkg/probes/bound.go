// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"net"
	"net/http"
	"slices"
	"sync"
)

// maxConns is how many connections for probes and metrics are open at a time. Each takes some 13 KiB.
const maxConns = 64

// openConns bounds the connections of a server: one too many closes the oldest one that waits for a request, or else the oldest one. A
// client that opens many and asks nothing neither takes memory nor keeps a probe from its answer.
type openConns struct {
	mu   sync.Mutex
	all  []net.Conn // the oldest first
	busy map[net.Conn]bool
}

// track is the ConnState of http.Server.
func (o *openConns) track(conn net.Conn, state http.ConnState) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch state {
	case http.StateNew:
		if len(o.all) == maxConns {
			oldest := max(0, slices.IndexFunc(o.all, func(c net.Conn) bool { return !o.busy[c] }))
			o.all[oldest].Close()
			o.forget(o.all[oldest])
		}
		o.all = append(o.all, conn)
	case http.StateActive:
		o.busy[conn] = true
	case http.StateIdle:
		delete(o.busy, conn)
	default:
		o.forget(conn)
	}
}

func (o *openConns) forget(conn net.Conn) {
	delete(o.busy, conn)
	o.all = slices.DeleteFunc(o.all, func(c net.Conn) bool { return c == conn })
}
