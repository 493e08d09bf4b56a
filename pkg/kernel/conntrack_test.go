// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// flow is a connection tracking entry: from a client to an address of the node or elsewhere, answered by whoever it was translated to.
type flow struct {
	proto            uint8
	from, to, answer string // address:port
}

func (f flow) entry() *netlink.ConntrackFlow {
	from, to, answer := netip.MustParseAddrPort(f.from), netip.MustParseAddrPort(f.to), netip.MustParseAddrPort(f.answer)
	tuple := func(a, b netip.AddrPort) netlink.IPTuple {
		return netlink.IPTuple{Protocol: f.proto, SrcIP: a.Addr().AsSlice(), DstIP: b.Addr().AsSlice(), SrcPort: a.Port(), DstPort: b.Port()}
	}
	family := uint8(unix.AF_INET)
	if from.Addr().Is6() {
		family = unix.AF_INET6
	}
	return &netlink.ConntrackFlow{FamilyType: family, Forward: tuple(from, to), Reverse: tuple(answer, from), TimeOut: 100}
}

// tracked lists the entries as "protocol from to".
func tracked(t *testing.T) (list []string) {
	t.Helper()
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range flows {
			from, _ := netip.AddrFromSlice(f.Forward.SrcIP)
			to, _ := netip.AddrFromSlice(f.Forward.DstIP)
			list = append(list, fmt.Sprintf("%d %s %s", f.Forward.Protocol, netip.AddrPortFrom(from.Unmap(), f.Forward.SrcPort),
				netip.AddrPortFrom(to.Unmap(), f.Forward.DstPort)))
		}
	}
	slices.Sort(list)
	return list
}

// TestDelFlows: of all entries those go that would keep a client of a mapped UDP port away from the pod.
func TestDelFlows(t *testing.T) {
	w := newWire(t)
	for _, p := range prefixes("10.1.0.1/24", "fd00::1/64", "192.0.2.1/32") {
		mustDo(t, w.host.AddAddress(w.bridge, p, false))
	}
	t.Cleanup(func() { _ = netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	const udp, tcp = unix.IPPROTO_UDP, unix.IPPROTO_TCP
	goes := []flow{
		{udp, "203.0.113.1:1000", "10.1.0.1:53", "10.1.0.5:5353"},  // to the pod
		{udp, "203.0.113.1:1001", "10.1.0.1:53", "10.1.0.1:53"},    // to the node, before the port was mapped
		{udp, "203.0.113.1:1002", "192.0.2.1:53", "10.1.0.5:5353"}, // to another address of the node
		{udp, "203.0.113.1:1003", "192.0.2.1:54", "10.1.0.5:5454"}, // the port of one address
		{udp, "[fd99::1]:1000", "[fd00::1]:53", "[fd00::5]:5353"},  //
		{udp, "203.0.113.1:1004", "10.1.0.1:53", "10.1.0.5:9999"},  // to the pod, by a mapping that was another
	}
	stays := []flow{
		{udp, "203.0.113.1:2000", "10.1.0.1:55", "10.1.0.5:5353"},       // another port
		{udp, "203.0.113.1:2001", "198.51.100.1:53", "198.51.100.1:53"}, // forwarded: a pod's own questions to a name server
		{udp, "203.0.113.1:2002", "10.1.0.1:53", "10.1.0.6:53"},         // to another pod
		{udp, "203.0.113.1:2003", "10.1.0.1:54", "10.1.0.5:5454"},       // not the address of the mapping
		{tcp, "203.0.113.1:2004", "10.1.0.1:53", "10.1.0.5:5353"},       // not UDP
		{udp, "[fd99::1]:2000", "[fd00::1]:54", "[fd00::5]:5454"},       // the other family has no such port
	}
	for _, f := range append(slices.Clone(goes), stays...) {
		if f.proto == tcp {
			continue // the library cannot write the state of a TCP connection
		}
		mustDo(t, netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(f.entry().FamilyType), f.entry()))
	}
	before := tracked(t)
	if len(before) != len(goes)+len(stays)-1 {
		t.Fatalf("made %d entries: %q", len(before), before)
	}
	mustDo(t, w.host.DelFlows(portList("tcp 53 10.1.0.5:5353")), w.host.DelFlows(nil)) // nothing of UDP
	if diff := cmp.Diff(before, tracked(t)); diff != "" {
		t.Errorf("without UDP ports:\n%s", diff)
	}
	for range 2 {
		mustDo(t, w.host.DelFlows(portList("udp 53 10.1.0.5:5353", "udp 192.0.2.1:54 10.1.0.5:5454", "udp 53 [fd00::5]:5353", "tcp 53 10.1.0.5:5353")))
	}
	var want []string
	for _, f := range stays {
		if f.proto == udp {
			want = append(want, fmt.Sprintf("%d %s %s", f.proto, f.from, f.to))
		}
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, tracked(t)); diff != "" {
		t.Errorf("left:\n%s", diff)
	}
}

// TestMatchFlow covers what cannot be put into the kernel's table from here.
func TestMatchFlow(t *testing.T) {
	local := map[netip.Addr]bool{netip.MustParseAddr("10.1.0.1"): true}
	match := udpFlow{mapping("udp 53 10.1.0.5:5353"), local}
	f := flow{unix.IPPROTO_TCP, "203.0.113.1:1", "10.1.0.1:53", "10.1.0.5:5353"}
	if match.MatchConntrackFlow(f.entry()) {
		t.Error("TCP")
	}
	f.proto = unix.IPPROTO_UDP
	if !match.MatchConntrackFlow(f.entry()) {
		t.Error("UDP is left")
	}
	if match.MatchConntrackFlow(&netlink.ConntrackFlow{}) {
		t.Error("an empty entry")
	}
}
