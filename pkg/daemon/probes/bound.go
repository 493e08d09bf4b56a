// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"net"
	"net/http"
	"slices"
	"sync"
)

// maxConns is the maximum number of open connections for probes and metrics. Each open connection needs about 13 KiB of memory.
const maxConns = 64

// openConns limits a server's open connections, because many idle ones could use much memory or delay a probe. Above maxConns, it
// closes the oldest that waits for a request, or the oldest of all if none does.
type openConns struct {
	mu   sync.Mutex
	all  []net.Conn // oldest first
	busy map[net.Conn]bool
}

// track is the ConnState of an http.Server.
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
