// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestPrune: only connections whose source address is lost are closed, and the watch restarts if its own was among them.
func TestPrune(t *testing.T) {
	link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "prune0"}}
	kerneltest.Must(t, netlink.LinkAdd(link), netlink.LinkSetUp(link))
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	var addresses []*netlink.Addr
	for _, text := range []string{"198.51.100.1/24", "198.51.100.2/24", "203.0.113.1/24"} {
		a, err := netlink.ParseAddr(text)
		kerneltest.Must(t, err, netlink.AddrAdd(link, a))
		addresses = append(addresses, a)
	}
	server, err := net.Listen("tcp4", "0.0.0.0:0")
	kerneltest.Must(t, err)
	t.Cleanup(func() { server.Close() })
	port := netip.MustParseAddrPort(server.Addr().String()).Port()

	c := newConnections()
	dial := func(from, to string) net.Conn {
		c.dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
		conn, err := c.dial(t.Context(), "tcp", netip.AddrPortFrom(netip.MustParseAddr(to), port).String())
		kerneltest.Must(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	goes, stays, local := dial("203.0.113.1", "198.51.100.1"), dial("198.51.100.1", "198.51.100.1"), dial("127.0.0.9", "127.0.0.1")
	began := make(chan bool)
	go c.keep(t.Context(), func(ctx context.Context) { began <- true; <-ctx.Done() })
	<-began
	if closed := c.prune(); closed != 0 {
		t.Errorf("%d connections closed while all addresses are there", closed)
	}
	kerneltest.Must(t, netlink.AddrDel(link, addresses[2]))
	if closed := c.prune(); closed != 1 || len(c.open) != 2 {
		t.Errorf("%d connections closed and %d open, want 1 and 2", closed, len(c.open))
	}
	<-began // second time
	if _, err := goes.Write([]byte("x")); err == nil {
		t.Error("the connection from an address that is gone is still open")
	}
	for _, conn := range []net.Conn{stays, local} {
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Errorf("the connection from %s: %v", conn.LocalAddr(), err)
		}
		kerneltest.Must(t, conn.Close())
	}
	if len(c.open) != 0 {
		t.Errorf("%d closed connections are remembered", len(c.open))
	}
}
