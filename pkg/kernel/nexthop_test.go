// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestNexthops: Nexthops returns an object with its protocol. Adding it again fails; replacing it and deleting a missing one do not.
func TestNexthops(t *testing.T) {
	n, _ := podNS(t)
	addUplink(t, n)
	link := mustLink(t, n, "eth0").Index
	four := Nexthop{ID: 1, Gateway: netip.MustParseAddr("192.0.2.2"), Link: link}
	six := Nexthop{ID: 1<<31 + 2, Gateway: netip.MustParseAddr("fd00:9::2"), Link: link, OnLink: true}
	kerneltest.Must(t, n.AddNexthop(four, ours), n.AddNexthop(six, 17))
	if err := n.AddNexthop(four, ours); !errors.Is(err, unix.EEXIST) {
		t.Errorf("added again: %v", err)
	}
	if err := n.AddNexthop(Nexthop{ID: 3, Gateway: netip.MustParseAddr("fd00:9::2"), Link: link}, ours); !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("a gateway that is not on the link: %v", err)
	}
	check := func(want ...FoundNexthop) {
		t.Helper()
		got, err := n.Nexthops()
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty()); diff != "" || err != nil {
			t.Errorf("%v, %s", err, diff)
		}
	}
	check(FoundNexthop{four, ours}, FoundNexthop{six, 17})
	four.Gateway = netip.MustParseAddr("192.0.2.3")
	kerneltest.Must(t, n.ReplaceNexthop(four, ours))
	check(FoundNexthop{four, ours}, FoundNexthop{six, 17})
	kerneltest.Must(t, n.DelNexthop(1), n.DelNexthop(1), n.DelNexthop(six.ID))
	check()
}

// TestProtocolRoutes: ProtocolRoutes returns the main table's routes of a protocol. DelProtocolRoute keeps other programs' to the same
// prefix.
func TestProtocolRoutes(t *testing.T) {
	n, _ := podNS(t)
	addUplink(t, n)
	link := mustLink(t, n, "eth0").Index
	kerneltest.Must(t, n.AddNexthop(Nexthop{ID: 1, Gateway: netip.MustParseAddr("192.0.2.2"), Link: link}, ours),
		n.AddNexthop(Nexthop{ID: 2, Gateway: netip.MustParseAddr("fd00:2::2"), Link: link}, ours))
	prefix := netip.MustParsePrefix
	wanted := []ProtocolRoute{{prefix("0.0.0.0/0"), 1, 5}, {prefix("10.1.0.0/24"), 0, 32767}, {prefix("10.2.0.0/24"), 1, 0},
		{prefix("10.3.0.0/24"), 2, 0}, {prefix("fd10:1::/64"), 0, 32767}, {prefix("fd10:2::/64"), 2, 1024}}
	for _, r := range wanted {
		kerneltest.Must(t, n.AddProtocolRoute(r, ours))
		if err := n.AddProtocolRoute(r, ours); !errors.Is(err, unix.EEXIST) {
			t.Errorf("%s added again: %v", r, err)
		}
		other := r
		other.Metric += 7
		kerneltest.Must(t, n.AddProtocolRoute(other, 17))
	}
	found := func(protocol int) (list []ProtocolRoute) {
		t.Helper()
		routes, err := n.ProtocolRoutes(protocol)
		kerneltest.Must(t, err)
		for _, r := range routes {
			if r.Protocol != protocol || r.Other {
				t.Errorf("%+v", r)
			}
			list = append(list, r.ProtocolRoute)
		}
		slices.SortFunc(list, func(a, b ProtocolRoute) int { return a.Dst.Compare(b.Dst) })
		return list
	}
	if diff := cmp.Diff(wanted, found(ours), cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Error(diff)
	}
	if got := (ProtocolRoute{Dst: prefix("fd10:2::/64"), Nexthop: 2}).Explicit(); got != wanted[5] {
		t.Errorf("%+v", got)
	}
	kerneltest.Must(t, n.ReplaceProtocolRoute(ProtocolRoute{prefix("10.3.0.0/24"), 1, 0}, ours))
	if got := found(ours)[3]; got.Nexthop != 1 {
		t.Errorf("%+v", got)
	}
	for _, r := range wanted {
		kerneltest.Must(t, n.DelProtocolRoute(r, ours), n.DelProtocolRoute(r, ours))
	}
	if mine, others := found(ours), found(17); len(mine) != 0 || len(others) != len(wanted) {
		t.Errorf("left %v, of other programs %v", mine, others)
	}
	all, err := n.ProtocolRoutes(0)
	connected := func(r FoundRoute) bool { return r.Other && r.Protocol == unix.RTPROT_KERNEL }
	if err != nil || len(all) <= len(wanted) || !slices.ContainsFunc(all, connected) {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestVXLAN: EnsureVXLAN creates a device, and recreates it only if the kernel cannot change it. It keeps another program's device.
func TestVXLAN(t *testing.T) {
	n, _ := podNS(t)
	const group = 142
	v := VXLAN{Name: "vx0", VNI: 42, Port: 4789, Local: netip.MustParseAddr("192.0.2.1"), MAC: net.HardwareAddr{0x0e, 0x50, 0, 0, 0, 1}, MTU: 1450}
	ensure := func(changes int) Link {
		t.Helper()
		link, made, err := n.EnsureVXLAN(v, group)
		found, listErr := n.VXLANs()
		kerneltest.Must(t, err, listErr)
		if made != changes || len(found) != 1 || cmp.Diff(v, found[0].VXLAN, cmpopts.EquateComparable(netip.Addr{})) != "" || found[0].Other ||
			!found[0].Up || found[0].Traits.Group != group {
			t.Fatalf("%d changes, %+v", made, found)
		}
		return link
	}
	first := ensure(1)
	v.MTU, v.MAC[5] = 1400, 2
	if ensure(2).Index != first.Index {
		t.Error("it was recreated for its MTU")
	}
	kerneltest.Must(t, n.SetDown(first))
	ensure(1)
	v.Local, v.MTU = netip.MustParseAddr("fd00::1"), 1430
	if ensure(2).Index == first.Index {
		t.Error("its local address did not change")
	}
	v.Name = "vx1"
	ensure(2)
	ensure(0)
	attrs := netlink.LinkAttrs{Name: "vx1", Group: group, MTU: 1430, HardwareAddr: v.MAC, Flags: net.FlagUp}
	kerneltest.Must(t, n.DelLink("vx1"), n.h.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: v.VNI, Port: v.Port, SrcAddr: v.Local.AsSlice(),
		Learning: true}))
	ensure(2) // recreated, because it learns
	foreign := v
	foreign.Name = "vx2"
	for _, f := range []VXLAN{foreign, {Name: v.Name, VNI: 7, Port: 9, Local: v.Local}} {
		var inTheWay *ForeignLink
		if _, changes, err := n.EnsureVXLAN(f, 7); !errors.As(err, &inTheWay) || inTheWay.Name != "vx1" || changes != 0 {
			t.Errorf("%v, %d changes", err, changes)
		}
	}
	ensure(0)
}

// TestTunnelEntries adds, replaces, reads and deletes forwarding entries and permanent neighbours. Deleting a missing one is no error.
func TestTunnelEntries(t *testing.T) {
	n, _ := podNS(t)
	link, _, err := n.EnsureVXLAN(VXLAN{Name: "vx0", VNI: 42, Port: 8472, Local: netip.MustParseAddr("192.0.2.1")}, 142)
	kerneltest.Must(t, err)
	mac := net.HardwareAddr{0x0e, 0x50, 0, 0, 0, 2}
	hops := []netip.Addr{netip.MustParseAddr("169.254.1.2"), netip.MustParseAddr("fe80::50:2")}
	remote := netip.MustParseAddr("198.51.100.2")
	kerneltest.Must(t, n.SetForwarding(link, mac, remote), n.SetNeighbour(link, hops[0], mac, ours), n.SetNeighbour(link, hops[1], mac, ours),
		n.SetNeighbour(link, netip.MustParseAddr("169.254.1.9"), mac, 17))
	check := func(neighbours map[netip.Addr]string, remotes map[string][]netip.Addr) {
		t.Helper()
		gotHops, err := n.PermanentNeighbours(link, ours)
		got, remotesErr := n.Forwarding(link)
		kerneltest.Must(t, err, remotesErr)
		same := cmpopts.EquateComparable(netip.Addr{})
		if diff := cmp.Diff(neighbours, gotHops, same) + cmp.Diff(remotes, got, same); diff != "" {
			t.Error(diff)
		}
	}
	check(map[netip.Addr]string{hops[0]: mac.String(), hops[1]: mac.String()}, map[string][]netip.Addr{mac.String(): {remote}})
	other := net.HardwareAddr{0x0e, 0x50, 0, 0, 0, 3}
	kerneltest.Must(t, n.SetForwarding(link, mac, remote.Next()), n.SetNeighbour(link, hops[0], other, ours), n.DelNeighbour(link, hops[1]),
		n.DelNeighbour(link, hops[1]))
	check(map[netip.Addr]string{hops[0]: other.String()}, map[string][]netip.Addr{mac.String(): {remote.Next()}})
	kerneltest.Must(t, n.DelForwarding(link, mac), n.DelForwarding(link, mac), n.DelNeighbour(link, hops[0]))
	check(map[netip.Addr]string{}, map[string][]netip.Addr{})
}
