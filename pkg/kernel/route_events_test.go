// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

const ours = 142

func routeSocket(t testing.TB, n *NS) (socket *os.File) {
	t.Helper()
	kerneltest.Must(t, n.inNamespace(func() (err error) { socket, err = subscribeRoutes(); return err }))
	return socket
}

// collectNotices returns a function whose calls return a namespace's relevant notices since the previous one.
func collectNotices(t *testing.T, n *NS) (since func() []string) {
	t.Helper()
	socket := routeSocket(t, n)
	notices := make(chan notice)
	ended := make(chan struct{})
	go func() {
		parse := func(datagram []byte) []notice { return routeNotices(datagram, ours) }
		listen(socket, parse, lostNotice(), func(list []notice) {
			for _, n := range list {
				select {
				case notices <- n:
				case <-t.Context().Done(): // a late notice, which no test awaits
				}
			}
		})
		close(ended)
	}()
	t.Cleanup(func() { socket.Close(); <-ended })
	known := routeLinks{}
	mark := ProtocolRoute{Dst: netip.MustParsePrefix("203.0.113.0/24")}
	return func() (list []string) {
		t.Helper()
		marked := make(chan error)
		go func() {
			marked <- errors.Join(n.AddProtocolRoute(mark, ours), n.DelProtocolRoute(mark, ours))
		}()
		for m := range notices {
			if m.What == "route "+mark.Dst.String() {
				break
			}
			if known.isRelevant(m) {
				text := m.What
				if m.Removed {
					text += " removed"
				}
				list = append(list, text)
			}
		}
		kerneltest.Must(t, <-marked)
		return list
	}
}

func addUplink(t *testing.T, n *NS) {
	t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"}
	kerneltest.Must(t, n.h.LinkAdd(veth), n.Set(Sysctl{"ipv6/conf/eth0/accept_dad", "0"}, Sysctl{"ipv6/conf/eth1/accept_dad", "0"}))
	kerneltest.Must(t, n.SetUp(mustLink(t, n, "eth1")), n.SetUp(mustLink(t, n, "eth0")))
	kerneltest.Must(t, n.AddAddress(mustLink(t, n, "eth0"), netip.MustParsePrefix("192.0.2.1/24"), false),
		n.AddAddress(mustLink(t, n, "eth0"), netip.MustParsePrefix("fd00:2::1/64"), false))
	until := time.Now().Add(time.Minute)
	kerneltest.Must(t, n.AwaitCarrier(mustLink(t, n, "eth0"), until), n.AwaitCarrier(mustLink(t, n, "eth1"), until),
		n.AwaitAddress(netip.MustParseAddr("fd00:2::1"), until))
}

// TestRouteEvents: only changes that can affect the routes of a protocol send events.
func TestRouteEvents(t *testing.T) {
	n, _ := podNS(t)
	addUplink(t, n)
	eth0 := mustLink(t, n, "eth0")
	since := collectNotices(t, n)
	foreign := func(dst, via string, table int) *netlink.Route {
		to := IPNet(netip.MustParsePrefix(dst))
		r := &netlink.Route{LinkIndex: eth0.Index, Dst: to, Protocol: unix.RTPROT_STATIC, Table: table}
		if via != "" {
			r.Gw = netip.MustParseAddr(via).AsSlice()
		}
		return r
	}
	hop := Nexthop{ID: 7, Gateway: netip.MustParseAddr("192.0.2.2"), Link: eth0.Index}
	other := Nexthop{ID: 8, Gateway: netip.MustParseAddr("192.0.2.3"), Link: eth0.Index}
	four, six := ProtocolRoute{netip.MustParsePrefix("10.2.0.0/24"), 7, 0}, ProtocolRoute{netip.MustParsePrefix("fd10::/64"), 0, 1024}
	since()
	for _, c := range []struct {
		what string
		do   func() error
		want []string
	}{
		{"ours come", func() error {
			return errors.Join(n.AddNexthop(hop, ours), n.AddNexthop(other, 17), n.AddProtocolRoute(four, ours), n.AddProtocolRoute(six, ours))
		}, nil},
		{"ours replaced", func() error {
			return n.ReplaceNexthop(Nexthop{7, netip.MustParseAddr("192.0.2.9"), eth0.Index, false}, ours)
		}, nil},
		{"ours go", func() error {
			return errors.Join(n.DelProtocolRoute(four, ours), n.DelProtocolRoute(six, ours), n.DelNexthop(7))
		},
			[]string{"route 10.2.0.0/24 removed", "route fd10::/64 removed", "nexthop 7 removed"}},
		{"a foreign nexthop goes", func() error { return n.DelNexthop(8) }, nil},
		{"foreign routes by a gateway", func() error {
			return errors.Join(n.h.RouteAdd(foreign("10.3.0.0/24", "192.0.2.2", 0)), n.h.RouteAdd(foreign("fd11::/64", "fd00:2::2", 0)),
				n.h.RouteDel(foreign("10.3.0.0/24", "192.0.2.2", 0)), n.h.RouteDel(foreign("fd11::/64", "fd00:2::2", 0)))
		}, nil},
		{"a foreign route on the link", func() error {
			return errors.Join(n.h.RouteAdd(foreign("10.3.0.0/24", "", 0)), n.h.RouteDel(foreign("10.3.0.0/24", "", 0)))
		}, []string{"route 10.3.0.0/24", "route 10.3.0.0/24"}},
		{"a default route", func() error {
			return errors.Join(n.h.RouteAdd(foreign("0.0.0.0/0", "192.0.2.2", 0)), n.h.RouteAdd(foreign("::/0", "fd00:2::2", 0)))
		}, []string{"route 0.0.0.0/0", "route ::/0"}},
		{"a route of another table", func() error { return n.h.RouteAdd(foreign("10.3.0.0/24", "", 100)) }, nil},
		{"ours replaced by another program", func() error {
			return errors.Join(n.AddProtocolRoute(ProtocolRoute{Dst: four.Dst}, ours), n.h.RouteReplace(foreign("10.2.0.0/24", "192.0.2.2", 0)))
		}, []string{"route 10.2.0.0/24"}},
		{"MTU", func() error { return n.SetMTU(eth0, 1400) }, []string{"link eth0"}},
		{"nothing new of a link", func() error { return errors.Join(n.SetAllMulti(eth0, true), n.SetAllMulti(eth0, false)) }, nil},
		{"an address", func() error {
			return errors.Join(n.AddAddress(eth0, netip.MustParsePrefix("fe80::77/64"), false), n.AddAddress(eth0, netip.MustParsePrefix("fd00:3::1/128"), false),
				n.AwaitAddress(netip.MustParseAddr("fd00:3::1"), time.Now().Add(time.Minute)))
		}, []string{"route fd00:3::1/128", "address fd00:3::1"}},
	} {
		kerneltest.Must(t, c.do())
		if diff := cmp.Diff(c.want, since()); diff != "" {
			t.Errorf("%s: %s", c.what, diff)
		}
	}
	kerneltest.Must(t, n.SetDown(eth0))
	if list := since(); !slices.Contains(list, "link eth0") {
		t.Errorf("down: %q", list)
	}
	kerneltest.Must(t, n.SetUp(eth0))
	if list := since(); !slices.Contains(list, "link eth0") {
		t.Errorf("up: %q", list)
	}
	kerneltest.Must(t, n.DelLink("eth0"))
	if list := since(); !slices.Contains(list, "link eth0") {
		t.Errorf("gone: %q", list)
	}
}

// TestRouteEventsOfPods: pods that come and go send no events. The first one about the bridge may arrive late, so it is allowed.
func TestRouteEventsOfPods(t *testing.T) {
	w := newWire(t) // the bridge is up before it has a port
	since := collectNotices(t, &w.host.NS)
	var seen []string
	for _, name := range []string{"kth1", "kth2", "kth3", "kth4"} {
		_, netns := podNS(t)
		index, err := w.host.AddVeth(Veth{Host: name, Pod: "eth0", Netns: netns, Master: w.bridge.Index})
		kerneltest.Must(t, err, w.host.SetUp(Link{Index: index, Name: name}))
		_, err = w.host.EnsureIFB("kti0", mustLink(t, w.host, name))
		kerneltest.Must(t, err, w.host.DelLink("kti0"), w.host.DelLink(name))
		seen = append(seen, since()...)
	}
	if len(seen) > 1 || len(seen) == 1 && seen[0] != "link "+w.bridge.Name {
		t.Errorf("%q", seen)
	}
}

// TestForeignRoutes: thousands of new routes of another program cause no notices and do not overflow the socket.
func TestForeignRoutes(t *testing.T) {
	n, _ := podNS(t)
	addUplink(t, n)
	since := collectNotices(t, n)
	since()
	kerneltest.Must(t, foreignRoutes(n, 5000))
	list := since()
	// An ordinary user may have a buffer that is too small.
	if most, err := os.ReadFile("/proc/sys/net/core/rmem_max"); err != nil || len(most) < len("1000000\n") {
		list = slices.DeleteFunc(list, func(what string) bool { return what == lostNotice().What })
	}
	if len(list) > 0 {
		t.Errorf("%d, the first %s", len(list), list[0])
	}
}

// foreignRoutes adds routes with a gateway, as another program would.
func foreignRoutes(n *NS, count int) error {
	link, _, err := n.Link("eth0")
	for i := range count {
		dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
		route := &netlink.Route{LinkIndex: link.Index, Dst: IPNet(dst), Gw: []byte{192, 0, 2, 2}, Protocol: unix.RTPROT_BIRD}
		err = errors.Join(err, n.h.RouteAdd(route))
	}
	return err
}

// TestRouteEventsMerge: a late receiver gets one event for all earlier changes and one for each later one, and then a closed channel.
func TestRouteEventsMerge(t *testing.T) {
	h := host(t)
	kerneltest.Clean(t)
	ctx, stop := context.WithCancel(t.Context())
	events, err := RouteEvents(ctx, ours)
	kerneltest.Must(t, err)
	for i := range 20 {
		r := ProtocolRoute{Dst: netip.MustParsePrefix(fmt.Sprintf("10.2.%d.0/24", i))}
		kerneltest.Must(t, h.AddProtocolRoute(r, ours), h.DelProtocolRoute(r, ours))
	}
	count, last := 0, ""
	for ; last != "route 10.2.19.0/24"; count++ {
		e := <-events
		if last = e.What; !e.Removed || e.Lost || !strings.HasPrefix(last, "route 10.2.") {
			t.Fatalf("%+v", e)
		}
	}
	if count > 2 { // one event was on its way to the channel
		t.Errorf("%d events", count)
	}
	stop()
	if e, ok := <-events; ok {
		t.Errorf("%+v", e)
	}
}

// TestRouteEventsLost: an overflow of the socket sends an event with Lost, after which isRelevant forgets the link states.
func TestRouteEventsLost(t *testing.T) {
	known := routeLinks{}
	up := notice{link: 3, state: linkState{unix.IFF_UP, 1500}}
	for i, c := range []struct {
		n    notice
		want bool
	}{{up, true}, {up, false}, {lostNotice(), true}, {up, true}, {notice{link: 3}, true}, {notice{link: 4, fresh: true}, false},
		{notice{link: 5}, true}, {notice{link: 4, gone: true}, false}, {notice{link: 6, gone: true}, false},
		{notice{link: 5, gone: true}, false}, {up, true}, {notice{link: 3, gone: true}, true}} {
		if got := known.isRelevant(c.n); got != c.want {
			t.Errorf("%d: %+v: %t", i, c.n, got)
		}
	}
	n, _ := podNS(t)
	socket := routeSocket(t, n)
	raw, err := socket.SyscallConn()
	kerneltest.Must(t, err)
	kerneltest.Must(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }), err)
	for i := range 50 {
		kerneltest.Must(t, n.AddBridge(fmt.Sprint("kt", i), nil, 0, false, false), n.SetUp(mustLink(t, n, fmt.Sprint("kt", i))))
	}
	notices := make(chan notice)
	go func() {
		listen(socket, func(b []byte) []notice { return routeNotices(b, ours) }, lostNotice(), func(list []notice) {
			for _, n := range list {
				notices <- n
			}
		})
		close(notices)
	}()
	for m := range notices {
		if m.Lost {
			break
		}
	}
	socket.Close()
	for range notices {
	}
}

// BenchmarkForeignRoutes measures how long another program needs to add 100,000 routes, with and without RouteEvents.
func BenchmarkForeignRoutes(b *testing.B) {
	for _, listens := range []bool{false, true} {
		b.Run(fmt.Sprint("listens=", listens), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				n, _ := podNS(b)
				veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"}
				kerneltest.Must(b, n.h.LinkAdd(veth), n.SetUp(mustLink(b, n, "eth1")), n.SetUp(mustLink(b, n, "eth0")),
					n.AddAddress(mustLink(b, n, "eth0"), netip.MustParsePrefix("192.0.2.1/24"), false))
				if listens {
					socket := routeSocket(b, n)
					defer socket.Close()
				}
				b.StartTimer()
				kerneltest.Must(b, foreignRoutes(n, 100_000))
			}
		})
	}
}

func FuzzRouteNotices(f *testing.F) {
	for _, kind := range []byte{unix.RTM_NEWLINK, unix.RTM_NEWROUTE, unix.RTM_DELROUTE, unix.RTM_NEWADDR, unix.RTM_DELNEXTHOP} {
		f.Add(append([]byte{44, 0, 0, 0, kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 24, 0, 0, 254, 142}, make([]byte, 22)...))
	}
	f.Fuzz(func(t *testing.T, datagram []byte) {
		for _, n := range routeNotices(datagram, ours) {
			if n.What == "" {
				t.Fatalf("%+v", n)
			}
		}
		_, _ = parseNeighbour(datagram)
	})
}
