// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestPrefix(t *testing.T) {
	for _, s := range []string{"10.1.0.5/24", "0.0.0.0/0", "10.0.0.1/32", "fd00::5/64", "::/0", "::1/128"} {
		want := netip.MustParsePrefix(s)
		if got, ok := Prefix(IPNet(want)); !ok || got != want {
			t.Errorf("%s was converted to %s, %t", s, got, ok)
		}
	}
	mapped := &net.IPNet{IP: net.ParseIP("10.1.0.5"), Mask: net.CIDRMask(24, 32)} // 16 bytes
	if got, ok := Prefix(mapped); !ok || got.String() != "10.1.0.5/24" {
		t.Errorf("got %s, %t", got, ok)
	}
	mapped.Mask = net.CIDRMask(120, 128)
	if got, ok := Prefix(mapped); !ok || got.String() != "10.1.0.5/24" {
		t.Errorf("got %s, %t", got, ok)
	}
	for what, n := range map[string]*net.IPNet{"nil": nil, "empty": {}, "no mask": {IP: net.IPv4(10, 0, 0, 1)},
		"holes": {IP: net.IPv4(10, 0, 0, 1), Mask: net.IPMask{255, 0, 255, 0}}, "bad length": {IP: net.IP{1, 2, 3}, Mask: net.CIDRMask(8, 32)}} {
		if got, ok := Prefix(n); ok {
			t.Errorf("%s: %s", what, got)
		}
	}
}

func TestAddresses(t *testing.T) {
	w := newWire(t)
	list := prefixes("10.1.0.5/24", "10.1.0.6/24", "10.2.0.5/32", "fd00::5/64")
	for _, p := range list {
		kerneltest.Must(t, w.pod.AddAddress(w.podSide, p, false))
		if err := w.pod.AddAddress(w.podSide, p, false); !errors.Is(err, unix.EEXIST) {
			t.Errorf("%s again: %v", p, err)
		}
	}
	sorted := cmpopts.SortSlices(func(a, b netip.Prefix) bool { return a.String() < b.String() })
	comparable := cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	got, err := w.pod.Addresses(w.podSide) // without fe80::/64, which the kernel added
	if diff := cmp.Diff(list, got, sorted, comparable); diff != "" || err != nil {
		t.Error(err, diff)
	}
	for range 2 {
		for _, p := range list[1:] {
			kerneltest.Must(t, w.pod.DelAddress(w.podSide, p))
		}
	}
	if got, err = w.pod.Addresses(w.podSide); len(got) != 1 || err != nil {
		t.Errorf("left %v, %v", got, err)
	}
}

func TestHasAddress(t *testing.T) {
	w := newWire(t)
	for _, p := range prefixes("10.1.0.1/24", "10.1.0.9/32", "fd00::1/64") {
		kerneltest.Must(t, w.host.AddAddress(w.bridge, p, false), w.host.AwaitAddress(p.Addr(), time.Now().Add(time.Minute)))
	}
	for s, want := range map[string]bool{"10.1.0.1": true, "10.1.0.9": true, "10.1.0.5": false, "fd00::1": true, "fd00::5": false,
		"127.0.0.1": false} {
		addr := netip.MustParseAddr(s)
		got, err := w.host.HasAddress(w.bridge, addr)
		if got != want || err != nil {
			t.Errorf("%s is there: %t, %v", s, got, err)
		}
		if got, err := w.host.HasAddress(w.hostSide, addr); got || err != nil {
			t.Errorf("%s is on another link: %t, %v", s, got, err)
		}
	}
}

// TestDAD: without duplicate address detection an address is usable at once, with it only after WaitForDAD.
func TestDAD(t *testing.T) {
	w := newWire(t)
	kerneltest.Must(t, w.pod.WaitForDAD(w.podSide, time.Minute)) // the link-local address
	kerneltest.Must(t, w.pod.Set(Sysctl{"ipv6/conf/eth0/accept_dad", "1"}, Sysctl{"ipv6/conf/eth0/dad_transmits", "1"}))
	kerneltest.Must(t, w.pod.AddAddress(w.podSide, netip.MustParsePrefix("fd00::5/64"), false), w.pod.WaitForDAD(w.podSide, 0))
	kerneltest.Must(t, w.pod.AddAddress(w.podSide, netip.MustParsePrefix("fd00::6/64"), true))
	if err := w.pod.WaitForDAD(w.podSide, 0); err == nil || !strings.Contains(err.Error(), "not done after 0s") {
		t.Errorf("the address was usable at once: %v", err)
	}
	kerneltest.Must(t, w.pod.WaitForDAD(w.podSide, time.Minute))
}

// TestDADFailed: WaitForDAD returns an error if a neighbour uses the address.
func TestDADFailed(t *testing.T) {
	w := newWire(t)
	taken := netip.MustParsePrefix("fd00::5/64")
	kerneltest.Must(t, w.host.AddAddress(w.bridge, taken, false), w.pod.Set(Sysctl{"ipv6/conf/eth0/accept_dad", "1"}))
	kerneltest.Must(t, w.pod.AddAddress(w.podSide, taken, true))
	if err := w.pod.WaitForDAD(w.podSide, time.Minute); err == nil ||
		!strings.Contains(err.Error(), "fd00::5 on eth0 is used by another node") {
		t.Errorf("got %v", err)
	}
}

func ptr(n int) *int { return &n }

func TestRoutes(t *testing.T) {
	w := newWire(t)
	for _, p := range prefixes("10.1.0.5/24", "fd00::5/64") {
		kerneltest.Must(t, w.pod.AddAddress(w.podSide, p, false))
	}
	gw4, gw6 := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")
	p := netip.MustParsePrefix
	for _, route := range []Route{
		{Dst: p("0.0.0.0/0"), Gateway: gw4},
		{Dst: p("::/0"), Gateway: gw6},
		{Dst: p("192.0.2.7/24"), Gateway: gw4, MTU: 1300, AdvMSS: 1200, Priority: 7},
		{Dst: p("198.51.100.0/24")},
		{Dst: p("203.0.113.0/24"), Gateway: gw4, Table: ptr(100)},
		{Dst: p("2001:db8::/48"), Gateway: gw6, MTU: 1300, Priority: 7},
		{Dst: p("2001:db8:1::/48"), Gateway: gw6, Table: ptr(100)},
		{Dst: p("192.0.3.0/24"), Scope: ptr(unix.RT_SCOPE_LINK)},
	} {
		if ok, err := w.pod.HasRoute(w.podSide, route); ok || err != nil {
			t.Errorf("%+v is there before: %v", route, err)
		}
		kerneltest.Must(t, w.pod.AddRoute(w.podSide, route))
		if ok, err := w.pod.HasRoute(w.podSide, route); !ok || err != nil {
			t.Errorf("%+v is missing: %v", route, err)
		}
		w.mustNotHave(t, route)
	}
}

// mustNotHave expects HasRoute to be false for a route that differs from an existing one in only one attribute.
func (w wire) mustNotHave(t *testing.T, route Route) {
	t.Helper()
	for what, change := range map[string]func(*Route){
		"other gateway":  func(r *Route) { r.Gateway = r.Dst.Masked().Addr().Next() },
		"other length":   func(r *Route) { r.Dst = netip.PrefixFrom(r.Dst.Addr(), r.Dst.Bits()+1) },
		"other priority": func(r *Route) { r.Priority = 4711 },
		"other mtu":      func(r *Route) { r.MTU = 1234 },
		"other table":    func(r *Route) { r.Table = ptr(4711) },
	} {
		other := route
		change(&other)
		if ok, err := w.pod.HasRoute(w.podSide, other); ok || err != nil {
			t.Errorf("%+v, %s: there, %v", route, what, err)
		}
	}
	if ok, _ := w.pod.HasRoute(Link{Index: 1, Name: "lo"}, route); ok {
		t.Errorf("%+v is there on lo", route)
	}
}

// TestECMP: a second gateway for a destination makes a multipath route.
func TestECMP(t *testing.T) {
	w := newWire(t)
	for dst, c := range map[string]struct{ address, one, two, none string }{
		"192.0.2.0/24":  {"10.1.0.5/24", "10.1.0.1", "10.1.0.2", "10.1.0.3"},
		"2001:db8::/48": {"fd00::5/64", "fd00::1", "fd00::2", "fd00::3"},
	} {
		kerneltest.Must(t, w.pod.AddAddress(w.podSide, netip.MustParsePrefix(c.address), false))
		route := func(gw string) Route {
			return Route{Dst: netip.MustParsePrefix(dst), Gateway: netip.MustParseAddr(gw)}
		}
		kerneltest.Must(t, w.pod.AddRoute(w.podSide, route(c.one)), w.pod.AddRoute(w.podSide, route(c.two)))
		for gw, want := range map[string]bool{c.one: true, c.two: true, c.none: false} {
			if ok, err := w.pod.HasRoute(w.podSide, route(gw)); ok != want || err != nil {
				t.Errorf("%s through %s: %t, %v", dst, gw, ok, err)
			}
		}
	}
}

func TestRouteTo(t *testing.T) {
	w := newWire(t)
	for _, p := range prefixes("10.1.0.1/24", "fd00::1/64") {
		kerneltest.Must(t, w.host.AddAddress(w.bridge, p, false))
	}
	for _, s := range []string{"10.1.0.5", "fd00::5"} {
		if index, err := w.host.RouteTo(netip.MustParseAddr(s)); index != w.bridge.Index || err != nil {
			t.Errorf("%s: %d, %v, want %d", s, index, err, w.bridge.Index)
		}
	}
	if index, err := w.host.RouteTo(netip.MustParseAddr("192.0.2.1")); err == nil {
		t.Errorf("a route to nowhere: %d", index)
	}
}
