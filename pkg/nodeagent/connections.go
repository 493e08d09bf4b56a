// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"
)

// connections are those to the API server. When the node loses the address that a connection comes from, HTTP/2 notices after 45 s only,
// and meanwhile the agent would not hear of the node's new address.
type connections struct {
	dialer net.Dialer

	mu      sync.Mutex
	open    map[*connection]struct{}
	restart context.CancelFunc // of the watch that keep runs
}

// connection is one that its owner closes, or prune.
type connection struct {
	net.Conn
	of *connections
}

// dialTimeout is short: a node without an address for a moment dials from that of its pods' bridge, and no answer comes to that.
const dialTimeout = 5 * time.Second

func newConnections() *connections {
	return &connections{dialer: net.Dialer{Timeout: dialTimeout}, open: map[*connection]struct{}{}}
}

// dial is that of a rest.Config.
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

// Close is that of net.Conn.
func (c *connection) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// keep runs a watch until ctx is done. It begins another one when prune closed a connection, since that one has no failures to wait for.
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

// prune closes connections from addresses that are not the node's any more, and returns how many.
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
