// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"
)

// TestOpenConns checks that above the limit, the oldest connection that waits for a request is closed, and one with a running request
// only if all have one.
func TestOpenConns(t *testing.T) {
	o := openConns{busy: map[net.Conn]bool{}}
	var ends []net.Conn
	add := func(state http.ConnState) net.Conn {
		ours, theirs := net.Pipe()
		t.Cleanup(func() { ours.Close(); theirs.Close() })
		ends = append(ends, theirs)
		o.track(ours, http.StateNew)
		if state != http.StateNew {
			o.track(ours, state)
		}
		return ours
	}
	closed := func(i int) bool {
		_ = ends[i].SetReadDeadline(time.Unix(1, 0))
		_, err := ends[i].Read(make([]byte, 1))
		return errors.Is(err, io.EOF)
	}
	first := add(http.StateActive)
	for range maxConns - 1 {
		add(http.StateIdle)
	}
	add(http.StateNew)
	if closed(0) || !closed(1) || closed(2) || len(o.all) != maxConns {
		t.Errorf("closed %t %t %t, %d open: want the second closed", closed(0), closed(1), closed(2), len(o.all))
	}
	for _, conn := range o.all {
		o.track(conn, http.StateActive)
	}
	add(http.StateNew)
	if !closed(0) || closed(2) {
		t.Error("want the first closed: all are busy")
	}
	idle := o.all[5]
	o.track(idle, http.StateIdle)
	add(http.StateActive)
	if slices.Contains(o.all, idle) {
		t.Error("want the connection closed that waits for a request again")
	}
	o.track(first, http.StateClosed) // a second time, by the server
	for len(o.all) > 0 {
		o.track(o.all[0], http.StateClosed)
	}
	if len(o.busy) > 0 {
		t.Errorf("%d are remembered", len(o.busy))
	}
}
