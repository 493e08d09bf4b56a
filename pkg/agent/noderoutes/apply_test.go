// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/kernel"
)

// monitor subscribes to events about links, routes, nexthop objects and neighbours. changes returns how many came since its last call.
func (n labNode) monitor() (changes func() int) {
	n.Helper()
	fd := -1
	n.runInside(func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		var groups uint32
		for _, g := range []int{unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_NEXTHOP} {
			groups |= 1 << (g - 1)
		}
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups})
	})
	n.Cleanup(func() { unix.Close(fd) })
	buffer := make([]byte, 1<<16)
	return func() (count int) {
		for {
			size, _, err := unix.Recvfrom(fd, buffer, 0)
			if err != nil {
				if !errors.Is(err, unix.EAGAIN) {
					n.Error(err)
				}
				return count
			}
			if !isDynamicNeighbour(buffer[:size]) {
				count++
			}
		}
	}
}

// isDynamicNeighbour reports whether an event is about a neighbour entry that the kernel itself changed.
func isDynamicNeighbour(message []byte) bool {
	kind, body := binary.NativeEndian.Uint16(message[4:]), message[unix.SizeofNlMsghdr:]
	return (kind == unix.RTM_NEWNEIGH || kind == unix.RTM_DELNEIGH) && binary.NativeEndian.Uint16(body[8:])&unix.NUD_PERMANENT == 0
}

// TestApply creates the wanted state and reaches the peers. A second call changes nothing, unwanted objects are deleted, and Remove
// restores the initial state.
func TestApply(t *testing.T) {
	l := newLAN(t, 2)
	a, b := newNode(t).joinLAN(l, "eth0", 1), newNode(t).joinLAN(l, "eth0", 2).withPods(2)
	a.addForeign()
	before := a.snapshot()
	want := a.directRoutes(l, 2, 3)
	want.Routes = append(want.Routes, kernel.ProtocolRoute{Dst: cidrOf(1, false), Metric: 32767},
		kernel.ProtocolRoute{Dst: cidrOf(1, true), Metric: 32767})
	changed := a.monitor()
	if r := a.mustApply(want, Options{}); r.Changes != 10 || r.Had != 0 || changed() != 10 {
		t.Errorf("first %+v", r)
	}
	for _, line := range []string{
		"route unicast 10.0.2.0/24 table main nhid 1342177284 via 192.0.2.2 dev eth0 proto 142",
		"route unicast fd10:2::/64 table main metric 1024 nhid 1342177285 via fd00:2::2 dev eth0",
		"route unreachable 10.0.1.0/24 table main metric 32767 proto 142",
		"nexthop id 1342177285 dev eth0 via fd00:2::2 proto 142",
	} {
		if !holds(a.snapshot(), line) {
			t.Errorf("no %s in\n%s", line, a.snapshot())
		}
	}
	for _, v6 := range []bool{false, true} {
		a.mustReach(podAddress(2, v6), true)
		b.mustReach(l.addressOf(1, v6), true)
	}
	changed()
	if r := a.mustApply(want, Options{}); r.Changes != 0 || r.Had != 6 || r.Unwanted != 0 || changed() != 0 {
		t.Errorf("the same again %+v", r)
	}
	fewer := a.directRoutes(l, 2)
	if r := a.mustApply(fewer, Options{Keep: true}); r.Changes != 0 || r.Unwanted != 4 || r.Kept != 6 || changed() != 0 {
		t.Errorf("fewer, kept %+v", r)
	}
	if r := a.mustApply(fewer, Options{}); r.Changes != 6 || r.Unwanted != 4 || r.Had != 6 {
		t.Errorf("fewer %+v", r)
	}
	a.mustReach(podAddress(2, false), true)
	if changes, err := Remove(a.ns); changes != 4 || err != nil {
		t.Errorf("removed %d, %v", changes, err)
	}
	a.mustBeUnchanged(before)
	if changes, err := Remove(a.ns); changes != 0 || err != nil {
		t.Errorf("removed %d again, %v", changes, err)
	}
}

func (n labNode) addForeign() {
	n.Helper()
	n.runInside(func() error {
		hop := mustLink("eth0").Attrs().Index
		return errors.Join(addRoute("eth0", "10.99.0.0/24", "192.0.2.2", 17, 0),
			addRoute("eth0", "10.0.2.0/24", "192.0.2.9", unix.RTPROT_STATIC, 77),
			addRoute("eth0", "fd10:2::/64", "fd00:2::9", unix.RTPROT_STATIC, 2000),
			netlink.NeighAdd(&netlink.Neigh{LinkIndex: hop, IP: []byte{192, 0, 2, 77}, State: netlink.NUD_PERMANENT,
				HardwareAddr: []byte{2, 0, 0, 0, 0, 7}}))
	})
	kerneltest.Must(n, n.ns.AddNexthop(kernel.Nexthop{ID: 7, Gateway: netip.MustParseAddr("192.0.2.2"), Link: n.linkOf("eth0").Index}, 17),
		n.ns.AddProtocolRoute(kernel.ProtocolRoute{Dst: netip.MustParsePrefix("10.98.0.0/24"), Nexthop: 7}, 17))
}

func holds(s *snapshot.Snapshot, part string) bool { return strings.Contains(s.String(), part) }

// TestConflicts: routes of other programs to a podCIDR are kept and reported in the format of ip-route(8), and all other routes added.
func TestConflicts(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	a.runInside(func() error {
		to, _ := netlink.ParseIPNet("10.0.4.0/24")
		return errors.Join(addRoute("eth0", "10.0.2.0/24", "192.0.2.9", unix.RTPROT_BOOT, 0),
			addRoute("eth0", "fd10:2::/64", "fd00:2::9", 80, 100),
			netlink.RouteAdd(&netlink.Route{Dst: to, Type: unix.RTN_BLACKHOLE, Protocol: unix.RTPROT_STATIC}))
	})
	before := a.snapshot()
	r, err := Apply(a.ns, a.directRoutes(l, 2, 3, 4), Options{})
	kerneltest.Must(t, err)
	want := map[netip.Prefix]string{
		cidrOf(2, false): "10.0.2.0/24 via 192.0.2.9 dev eth0 proto boot", cidrOf(2, true): "fd10:2::/64 via fd00:2::9 dev eth0 proto 80 metric 100",
		cidrOf(4, false): "blackhole 10.0.4.0/24 proto static",
	}
	if diff := cmp.Diff(want, r.Conflicts); diff != "" || len(r.Failed) > 0 {
		t.Errorf("%s%v", diff, r.Failed)
	}
	if !holds(a.snapshot(), "route unicast fd10:4::/64") || !holds(a.snapshot(), "route unicast 10.0.3.0/24") {
		t.Errorf("routes without a conflict are missing in\n%s", a.snapshot())
	}
	if again, err := Apply(a.ns, a.directRoutes(l, 2, 3, 4), Options{}); err != nil || again.Changes != 0 || len(again.Conflicts) != 3 {
		t.Errorf("again %+v, %v", again, err)
	}
	_, err = Remove(a.ns)
	kerneltest.Must(t, err)
	a.mustBeUnchanged(before)
}

// TestInside: Options.Inside reports other programs' routes to a part of a peer's podCIDR, but not those to pods of this node.
func TestInside(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	a.runInside(func() error {
		return errors.Join(addRoute("eth0", "10.0.2.128/25", "192.0.2.9", unix.RTPROT_STATIC, 0),
			addRoute("eth0", "10.0.1.7/32", "192.0.2.9", unix.RTPROT_STATIC, 0))
	})
	r, err := Apply(a.ns, a.directRoutes(l, 2, 3), Options{Inside: true})
	kerneltest.Must(t, err)
	want := map[netip.Prefix]string{cidrOf(2, false): "10.0.2.128/25 via 192.0.2.9 dev eth0 proto static"}
	if diff := cmp.Diff(want, r.Inside); diff != "" {
		t.Error(diff)
	}
	_, err = Remove(a.ns)
	kerneltest.Must(t, err)
}

// TestForeignNexthop: another program's nexthop object with an ID of the agent is kept. Only the routes that need this ID fail.
func TestForeignNexthop(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	foreign := kernel.Nexthop{ID: nexthopID(2, false), Gateway: l.addressOf(9, false), Link: a.linkOf("eth0").Index}
	kerneltest.Must(t, a.ns.AddNexthop(foreign, 17))
	before := a.snapshot()
	r, err := Apply(a.ns, a.directRoutes(l, 2, 3), Options{})
	kerneltest.Must(t, err)
	says := fmt.Sprint(r.Failed[cidrOf(2, false)])
	if len(r.Failed) != 1 || !strings.Contains(says, "nexthop 1342177284 belongs to another program") || r.Changes != 6 {
		t.Errorf("%+v", r)
	}
	_, err = Remove(a.ns)
	kerneltest.Must(t, err)
	a.mustBeUnchanged(before)
}

// TestFailedAlone: if the kernel refuses a change, it is reported, the object keeps its state, and all other changes are made.
func TestFailedAlone(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	a.mustApply(a.directRoutes(l, 2, 3), Options{})
	want := a.directRoutes(l, 2, 3, 4)
	want.Nexthops[0].Gateway = netip.MustParseAddr("198.51.100.1") // on no link
	want.Nexthops[2].ID, want.Routes[2].Nexthop = 99, 99           // a new object for the third node, which the kernel refuses
	want.Nexthops[2].Gateway = netip.MustParseAddr("198.51.100.2")
	want.Routes[5].Nexthop = nexthopID(4, false) // IPv6 through an IPv4 gateway
	r, err := Apply(a.ns, want, Options{})
	kerneltest.Must(t, err)
	for _, dst := range []netip.Prefix{cidrOf(2, false), cidrOf(3, false), cidrOf(4, true)} {
		if r.Failed[dst] == nil {
			t.Errorf("%s did not fail", dst)
		}
		t.Log(dst, r.Failed[dst])
	}
	s := a.snapshot()
	for _, line := range []string{"10.0.2.0/24 table main nhid 1342177284 via 192.0.2.2", "10.0.3.0/24 table main nhid 1342177286 via 192.0.2.3",
		"10.0.4.0/24 table main", "fd10:2::/64", "fd10:3::/64"} {
		if !holds(s, line) {
			t.Errorf("no %s in\n%s", line, s)
		}
	}
	if len(r.Failed) != 3 || r.Other != nil || holds(s, "route unicast fd10:4::/64") {
		t.Errorf("%+v", r)
	}
	if r := a.mustApply(a.directRoutes(l, 2, 3, 4), Options{}); r.Changes != 1 {
		t.Errorf("mended: %+v", r)
	}
}

// TestFamilyOfGateway: one Apply can move the nexthop object of an IPv4 podCIDR from an IPv6 to an IPv4 gateway, even if an unwanted IPv6
// route still uses it.
func TestFamilyOfGateway(t *testing.T) {
	l := newLAN(t, 2)
	a, _ := newNode(t).joinLAN(l, "eth0", 1), newNode(t).joinLAN(l, "eth0", 2).withPods(2)
	link := a.linkOf("eth0").Index
	want := Wanted{Nexthops: []kernel.Nexthop{{ID: 5, Gateway: l.addressOf(2, true), Link: link}},
		Routes: []kernel.ProtocolRoute{{Dst: cidrOf(2, false), Nexthop: 5}, {Dst: cidrOf(2, true), Nexthop: 5}}}
	a.mustApply(want, Options{})
	a.mustReach(podAddress(2, false), true)
	want = Wanted{Nexthops: []kernel.Nexthop{{ID: 5, Gateway: l.addressOf(2, false), Link: link}}, Routes: want.Routes[:1]}
	a.mustApply(want, Options{})
	a.mustReach(podAddress(2, false), true)
	if s := a.snapshot(); !holds(s, "nexthop id 5 dev eth0 via 192.0.2.2 proto 142") || holds(s, "fd10:2::/64") {
		t.Errorf("%s", s)
	}
}

// TestLinkDown: one Apply restores the routes and nexthop objects that the kernel removed with the link.
func TestLinkDown(t *testing.T) {
	l := newLAN(t, 2)
	a, _ := newNode(t).joinLAN(l, "eth0", 1), newNode(t).joinLAN(l, "eth0", 2).withPods(2)
	want := a.directRoutes(l, 2, 3)
	a.mustApply(want, Options{})
	a.setUp("eth0", false)
	if s := a.snapshot(); holds(s, "proto 142") {
		t.Errorf("the kernel kept\n%s", s)
	}
	if r, err := Apply(a.ns, want, Options{}); err != nil || len(r.Failed) != 4 {
		t.Errorf("down: %+v, %v", r, err)
	}
	a.setUp("eth0", true)
	a.runInside(func() error { return addAddress("eth0", "fd00:2::1/64") }) // the kernel removes these too
	if r := a.mustApply(want, Options{}); r.Changes != 8 {
		t.Errorf("up: %+v", r)
	}
	a.mustReach(podAddress(2, false), true)
	a.mustReach(podAddress(2, true), true)
}

func TestWays(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	a.runInside(func() error { return addRoute("eth0", "198.51.100.0/24", "192.0.2.2", unix.RTPROT_STATIC, 0) })
	addr := netip.MustParseAddr
	ways := Ways(a.ns, []netip.Addr{addr("192.0.2.2"), addr("fd00:2::2"), addr("198.51.100.1"), addr("203.0.113.1"), addr("192.0.2.1"),
		addr("fd00:2::1")})
	for gateway, want := range map[string]string{"192.0.2.2": "eth0 true ", "fd00:2::2": "eth0 true ", "198.51.100.1": "eth0 false ",
		"203.0.113.1": " false this node has no route to 203.0.113.1", "192.0.2.1": "eth0 false 192.0.2.1 is an address of this node",
		"fd00:2::1": "eth0 false fd00:2::1 is an address of this node"} {
		w := ways[addr(gateway)]
		if got := strings.Join([]string{w.Name, map[bool]string{true: "true", false: "false"}[w.OnLink], w.Reason}, " "); got != want {
			t.Errorf("%s: %q, want %q", gateway, got, want)
		}
	}
}
