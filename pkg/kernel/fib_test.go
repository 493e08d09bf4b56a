// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"io/fs"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestMatchRoute covers local, connected, unreachable and multipath destinations, and a deleted connected route that AddConnected restores.
func TestMatchRoute(t *testing.T) {
	w := newWire(t)
	own := prefixes("10.1.0.2/24", "fd00::2/64")
	for _, p := range own {
		kerneltest.Must(t, w.pod.AddAddress(w.podSide, p, false), w.pod.AwaitAddress(p.Addr(), time.Now().Add(time.Minute)))
	}
	expect := func(addr, dst string, local, onLink, connected bool) {
		t.Helper()
		m, err := w.pod.MatchRoute(netip.MustParseAddr(addr))
		if dst == "" {
			if !NoRoute(err) {
				t.Errorf("%s: %+v, %v, want no route", addr, m, err)
			}
			return
		}
		if err != nil || m.Dst.String() != dst || m.Local != local || m.OnLink != onLink || m.Connected != connected ||
			!m.Through(w.podSide) || m.FirstLink() != w.podSide.Index {
			t.Errorf("%s: %+v, %v", addr, m, err)
		}
	}
	for _, c := range []struct{ own, other, subnet, beyond, gateway, world string }{
		{"10.1.0.2", "10.1.0.9", "10.1.0.0/24", "192.0.2.1", "10.1.0.1", "0.0.0.0/0"},
		{"fd00::2", "fd00::9", "fd00::/64", "2001:db8::1", "fd00::1", "::/0"},
	} {
		own, other, subnet := netip.MustParseAddr(c.own), netip.MustParseAddr(c.other), netip.MustParsePrefix(c.subnet)
		expect(c.own, netip.PrefixFrom(own, own.BitLen()).String(), true, true, true)
		expect(c.other, c.subnet, false, true, true)
		expect(c.beyond, "", false, false, false)
		for range 2 {
			kerneltest.Must(t, w.pod.AddConnected(w.podSide, netip.PrefixFrom(own, subnet.Bits())))
		}
		connected := &netlink.Route{LinkIndex: w.podSide.Index, Dst: IPNet(subnet), Scope: netlink.SCOPE_LINK}
		kerneltest.Must(t, w.pod.h.RouteDel(connected))
		expect(c.other, "", false, false, false)
		kerneltest.Must(t, w.pod.AddConnected(w.podSide, netip.PrefixFrom(own, subnet.Bits())))
		expect(c.other, c.subnet, false, true, true)
		for _, gateway := range []string{c.gateway, c.other} { // then with several next hops
			kerneltest.Must(t, w.pod.AddRoute(w.podSide, Route{Dst: netip.MustParsePrefix(c.world), Gateway: netip.MustParseAddr(gateway)}))
			expect(c.beyond, c.world, false, false, false)
		}
		for _, refusal := range []int{unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT} {
			route := &netlink.Route{Dst: IPNet(netip.PrefixFrom(other, other.BitLen())), Type: refusal}
			kerneltest.Must(t, w.pod.h.RouteAdd(route))
			expect(c.other, "", false, false, false)
			kerneltest.Must(t, w.pod.h.RouteDel(route))
		}
	}
}

// TestLinkForwards: Forwards4 and Forwards6 equal the sysctl files of the link.
func TestLinkForwards(t *testing.T) {
	w := newWire(t)
	for path, forwards := range map[string]func(Link) bool{
		"ipv4/conf/eth0/forwarding":       func(l Link) bool { return l.Forwards4 },
		"ipv6/conf/eth0/force_forwarding": func(l Link) bool { return l.Forwards6 },
	} {
		if _, err := w.pod.Get(path); errors.Is(err, fs.ErrNotExist) {
			t.Logf("SKIPPED: before Linux 6.17 there is no %s", path)
			continue
		}
		for _, value := range []string{"1", "0", "1"} {
			kerneltest.Must(t, w.pod.Set(Sysctl{path, value}))
			if on := forwards(mustLink(t, w.pod, "eth0")); on != (value == "1") {
				t.Errorf("%s is %s: %t", path, value, on)
			}
		}
	}
}
