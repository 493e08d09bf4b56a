// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Flow is a connection tracking entry: the protocol (17 for UDP, 6 for TCP), the client, the original destination, and the translated one,
// from which replies come. The addresses have the form address:port.
type Flow [4]string

func (f Flow) entry() *netlink.ConntrackFlow {
	from, to, answer := netip.MustParseAddrPort(f[1]), netip.MustParseAddrPort(f[2]), netip.MustParseAddrPort(f[3])
	protocol := map[string]uint8{"6": unix.IPPROTO_TCP, "17": unix.IPPROTO_UDP}[f[0]]
	tuple := func(a, b netip.AddrPort) netlink.IPTuple {
		return netlink.IPTuple{Protocol: protocol, SrcIP: a.Addr().AsSlice(), DstIP: b.Addr().AsSlice(), SrcPort: a.Port(), DstPort: b.Port()}
	}
	family := uint8(unix.AF_INET)
	if from.Addr().Is6() {
		family = unix.AF_INET6
	}
	entry := &netlink.ConntrackFlow{FamilyType: family, Forward: tuple(from, to), Reverse: tuple(answer, from), TimeOut: 100}
	if protocol == unix.IPPROTO_TCP {
		entry.ProtoInfo = &netlink.ProtoInfoTCP{State: nl.TCP_CONNTRACK_ESTABLISHED}
	}
	return entry
}

// Tracked returns the connection tracking entries as "protocol from to", without the IGMP entries that the kernel creates for other tests'
// links.
func Tracked(t testing.TB) (list []string) {
	t.Helper()
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range flows {
			if f.Forward.Protocol == unix.IPPROTO_IGMP {
				continue
			}
			from, _ := netip.AddrFromSlice(f.Forward.SrcIP)
			to, _ := netip.AddrFromSlice(f.Forward.DstIP)
			list = append(list, fmt.Sprintf("%d %s %s", f.Forward.Protocol, netip.AddrPortFrom(from.Unmap(), f.Forward.SrcPort),
				netip.AddrPortFrom(to.Unmap(), f.Forward.DstPort)))
		}
	}
	slices.Sort(list)
	return list
}

// Track creates the given connection tracking entries.
func Track(t testing.TB, flows []Flow) {
	t.Helper()
	t.Cleanup(func() {
		if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			t.Error(err)
		}
	})
	for _, f := range flows {
		if err := netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(f.entry().FamilyType), f.entry()); err != nil {
			t.Fatal(err)
		}
	}
	if got := Tracked(t); len(got) != len(flows) {
		t.Fatalf("made %d entries: %q", len(got), got)
	}
}
