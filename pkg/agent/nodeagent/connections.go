// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"
)

// The type connections contains the open connections to the API server. If the node loses the source address of a connection, HTTP/2
// detects the broken connection only after 45 s. During the 45 s, the agent would not learn about the node's new address.
type connections struct {
	dialer net.Dialer

	mu      sync.Mutex
	open    map[*connection]struct{}
	restart context.CancelFunc // cancels the watch that keep runs
}

// The type connection is one open connection to the API server. Either the HTTP client or prune() closes it.
type connection struct {
	net.Conn
	of *connections
}

// dialTimeout is the maximum time to establish a connection to the API server. dialTimeout is short, because a dial can hang while the node
// has no address. The kernel then uses the address of the pods' bridge as the source address, and the replies are lost.
const dialTimeout = 5 * time.Second

func newConnections() *connections {
	return &connections{dialer: net.Dialer{Timeout: dialTimeout}, open: map[*connection]struct{}{}}
}

// dial() opens a connection to the API server and adds the connection to the open connections. A rest.Config uses dial() for its
// connections.
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

// Close closes the connection and removes it from the open connections.
func (c *connection) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// keep() runs a watch until ctx is done. If prune() closes the connection of the watch, keep() immediately starts a new watch. The old
// watch would retry only after a delay.
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

// prune() closes each connection whose source address the node has lost, and returns the number of closed connections.
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
