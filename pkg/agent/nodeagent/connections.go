// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"
)

// connections holds the open connections to the API server. If the node loses a connection's source address, HTTP/2 notices only after 45
// s, and meanwhile the agent would not learn the node's new address.
type connections struct {
	dialer net.Dialer

	mu      sync.Mutex
	open    map[*connection]struct{}
	restart context.CancelFunc // cancels the watch that keep runs
}

// connection is one open connection. Either the HTTP client or prune closes it.
type connection struct {
	net.Conn
	of *connections
}

// dialTimeout is short, because a dial can hang while the node has no address: the kernel then picks the address of the pods' bridge as the
// source, and the replies are lost.
const dialTimeout = 5 * time.Second

func newConnections() *connections {
	return &connections{dialer: net.Dialer{Timeout: dialTimeout}, open: map[*connection]struct{}{}}
}

// dial opens a connection for a rest.Config and keeps track of it.
func (c *connections) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := c.dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tracked := &connection{Conn: conn, of: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open[tracked] = struct{}{}
	return tracked, nil
}

// Close closes the connection and forgets it.
func (c *connection) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// keep runs a watch until ctx is done. It restarts one whose connection prune closed, because the old watch would retry only after a delay.
func (c *connections) keep(ctx context.Context, watch func(context.Context)) {
	for ctx.Err() == nil {
		inner, stop := context.WithCancel(ctx)
		c.mu.Lock()
		c.restart = stop
		c.mu.Unlock()
		watch(inner)
		stop()
	}
}

// prune closes each connection whose source address the node has lost, and returns their number.
func (c *connections) prune() (closed int) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		return 0
	}
	have := map[netip.Addr]bool{}
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			have[p.Addr()] = true
		}
	}
	c.mu.Lock()
	var lost []*connection
	for conn := range c.open {
		from, err := netip.ParseAddrPort(conn.LocalAddr().String())
		if addr := from.Addr().Unmap().WithZone(""); err == nil && !addr.IsLoopback() && !have[addr] {
			lost = append(lost, conn)
		}
	}
	restart := c.restart
	c.mu.Unlock()
	for _, conn := range lost {
		_ = conn.Close()
	}
	if len(lost) > 0 && restart != nil {
		restart()
	}
	return len(lost)
}
