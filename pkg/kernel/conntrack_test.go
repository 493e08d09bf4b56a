// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
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
	entry := &netlink.ConntrackFlow{FamilyType: family, Forward: tuple(from, to), Reverse: tuple(answer, from), TimeOut: 100}
	if f.proto == unix.IPPROTO_TCP {
		entry.ProtoInfo = &netlink.ProtoInfoTCP{State: nl.TCP_CONNTRACK_ESTABLISHED}
	}
	return entry
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

// walks counts the dumps of the connection tracking table from now on, as the debug log tells of them: "family" or "family filtered".
func walks(t *testing.T) func() []string {
	t.Helper()
	var seen bytes.Buffer
	before := slog.Default()
	t.Cleanup(func() { slog.SetDefault(before) })
	slog.SetDefault(slog.New(slog.NewTextHandler(&seen, &slog.HandlerOptions{Level: slog.LevelDebug})))
	return func() (list []string) {
		for line := range strings.Lines(seen.String()) {
			if _, rest, ok := strings.Cut(strings.TrimSpace(line), `op="conntrack walk" `); ok {
				list = append(list, rest)
			}
		}
		seen.Reset()
		return list
	}
}

// track makes the entries.
func track(t *testing.T, flows []flow) {
	t.Helper()
	t.Cleanup(func() { mustDo(t, netlink.ConntrackTableFlush(netlink.ConntrackTable)) })
	for _, f := range flows {
		mustDo(t, netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(f.entry().FamilyType), f.entry()))
	}
	if got := tracked(t); len(got) != len(flows) {
		t.Fatalf("made %d entries: %q", len(got), got)
	}
}

// TestDelFlows (F-38): of all entries those go that would keep a client of a mapped UDP port away from the pod.
func TestDelFlows(t *testing.T) {
	w := newWire(t)
	for _, p := range prefixes("10.1.0.1/24", "fd00::1/64", "192.0.2.1/32") {
		mustDo(t, w.host.AddAddress(w.bridge, p, false))
	}
	const udp, tcp = unix.IPPROTO_UDP, unix.IPPROTO_TCP
	goes := []flow{
		{udp, "203.0.113.1:1000", "10.1.0.1:53", "10.1.0.5:5353"},  // to the pod
		{udp, "203.0.113.1:1001", "10.1.0.1:53", "10.1.0.1:53"},    // to the node, before the port was mapped
		{udp, "203.0.113.1:1002", "192.0.2.1:53", "10.1.0.5:5353"}, // to another address of the node
		{udp, "203.0.113.1:1003", "192.0.2.1:54", "10.1.0.5:5454"}, // the port of one address
		{udp, "[fd99::1]:1000", "[fd00::1]:53", "[fd00::5]:5353"},  //
		{udp, "203.0.113.1:1004", "10.1.0.1:53", "10.1.0.5:9999"},  // to the pod, by a mapping that was another
		{udp, "127.0.0.1:1005", "127.0.0.9:53", "127.0.0.9:53"},    // all of 127.0.0.0/8 is local
		{udp, "[fd99::1]:1001", "[fd00::1]:65535", "[fd00::1]:65535"},
	}
	stays := []flow{
		{udp, "203.0.113.1:2000", "10.1.0.1:55", "10.1.0.5:5353"},       // another port
		{udp, "203.0.113.1:2001", "198.51.100.1:53", "198.51.100.1:53"}, // forwarded: a pod's own questions to a name server
		{udp, "203.0.113.1:2002", "10.1.0.1:53", "10.1.0.6:53"},         // to another pod
		{udp, "203.0.113.1:2003", "10.1.0.1:54", "10.1.0.5:5454"},       // not the address of the mapping
		{tcp, "203.0.113.1:2004", "10.1.0.1:53", "10.1.0.5:5353"},       // not UDP
		{udp, "[fd99::1]:2000", "[fd00::1]:54", "[fd00::5]:5454"},       // the other family has no such port
		{udp, "[fd99::1]:2001", "[fd00::1]:56", "[fd00::1]:56"},         // nor this one
		{udp, "203.0.113.1:2005", "10.96.0.10:53", "10.1.0.5:5353"},     // to the pod, by a Service
		{udp, "203.0.113.1:2006", "10.1.0.5:53", "10.1.0.5:53"},         // to the pod itself
		{udp, "10.1.0.1:53", "203.0.113.1:2007", "203.0.113.1:2007"},    // from the port
		{udp, "203.0.113.1:2008", "10.1.0.1:5353", "10.1.0.5:5353"},     // to the pod's port by another of the node
	}
	track(t, append(slices.Clone(goes), stays...))
	before, walked := tracked(t), walks(t)
	mustDo(t, w.host.DelFlows(portList("tcp 53 10.1.0.5:5353", "sctp 53 10.1.0.5:5353")), w.host.DelFlows(nil))
	if diff := cmp.Diff(before, tracked(t)); diff != "" || len(walked()) > 0 {
		t.Errorf("without UDP ports:\n%s", diff)
	}
	ports := portList("udp 53 10.1.0.5:5353", "udp 192.0.2.1:54 10.1.0.5:5454", "udp 53 [fd00::5]:5353", "tcp 53 10.1.0.5:5353", "udp 65535 [fd00::5]:65535", "udp 56 10.1.0.5:80")
	for i := range uint16(300) {
		ports = append(ports, HostPort{Protocol: "udp", Port: 10000 + i, To: netip.MustParseAddrPort("10.1.0.5:80")})
	}
	for range 2 {
		mustDo(t, w.host.DelFlows(ports))
		if got := walked(); len(got) != 1 {
			t.Errorf("%d walks for both families: %q", len(got), got)
		}
	}
	var want []string
	for _, f := range stays {
		want = append(want, fmt.Sprintf("%d %s %s", f.proto, f.from, f.to))
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, tracked(t)); diff != "" {
		t.Errorf("left:\n%s", diff)
	}
}

// TestDelFlowsAnswered (F-38): an answer that was on its way while its entry was deleted made one the other way round, which goes too. What the
// client made meanwhile by a new datagram stays.
func TestDelFlowsAnswered(t *testing.T) {
	newWire(t)
	const udp = unix.IPPROTO_UDP
	old := []flow{{udp, "203.0.113.1:1000", "10.1.0.1:53", "10.1.0.1:53"}, {udp, "[fd99::1]:1000", "[fd00::1]:53", "[fd00::1]:53"},
		{udp, "203.0.113.1:1001", "10.1.0.1:53", "10.1.0.1:53"}}
	now := []flow{{udp, "10.1.0.1:53", "203.0.113.1:1000", "203.0.113.1:1000"}, {udp, "[fd00::1]:53", "[fd99::1]:1000", "[fd99::1]:1000"},
		{udp, "203.0.113.1:1001", "10.1.0.1:53", "10.1.0.5:5353"}}
	track(t, old)
	table, err := openConntrack()
	mustDo(t, err)
	defer table.Close()
	var stale []udpFlow
	mustDo(t, table.dump(unix.AF_UNSPEC, nil, func(f udpFlow) { stale = append(stale, f) }), netlink.ConntrackTableFlush(netlink.ConntrackTable))
	track(t, now)
	mustDo(t, table.deleteAll(table.turned(stale)))
	if diff := cmp.Diff([]string{"17 203.0.113.1:1001 10.1.0.1:53"}, tracked(t)); diff != "" || len(stale) != len(old) {
		t.Errorf("of %d:\n%s", len(stale), diff)
	}
}

// TestDelFlowsOfOneFamily: the kernel tells only of what can be meant, and with one port only of that.
func TestDelFlowsOfOneFamily(t *testing.T) {
	w := newWire(t)
	for _, p := range prefixes("10.1.0.1/24", "fd00::1/64") {
		mustDo(t, w.host.AddAddress(w.bridge, p, false))
	}
	var flows []flow
	for port := 50; port < 54; port++ {
		four, six := fmt.Sprintf("10.1.0.1:%d", port), fmt.Sprintf("[fd00::1]:%d", port)
		flows = append(flows, flow{unix.IPPROTO_UDP, "203.0.113.1:1000", four, four}, flow{unix.IPPROTO_UDP, "[fd99::1]:1000", six, six},
			flow{unix.IPPROTO_TCP, "203.0.113.1:1000", four, four})
	}
	track(t, flows)
	walked := walks(t)
	left := len(flows)
	for _, x := range []struct {
		ports  []HostPort
		family int
		gone   int
	}{
		{portList("udp 50 10.1.0.5:80"), unix.AF_INET, 1},
		{portList("udp 51 10.1.0.5:80", "udp 52 10.1.0.5:80", "tcp 53 10.1.0.5:80"), unix.AF_INET, 2},
		{portList("udp 50 [fd00::5]:80"), unix.AF_INET6, 1},
		{portList("udp 51 [fd00::5]:80", "udp 52 [fd00::5]:80"), unix.AF_INET6, 2},
	} {
		mustDo(t, w.host.DelFlows(x.ports))
		left -= x.gone
		if got := tracked(t); len(got) != left {
			t.Errorf("%v left %q", x.ports, got)
		}
		want := []string{fmt.Sprintf("family=%d filtered=true error=<nil>", x.family)}
		if diff := cmp.Diff(want, walked()); diff != "" {
			t.Errorf("%v:\n%s", x.ports, diff)
		}
	}
}

// TestFlowFilter: the kernel leaves out what is not asked for, so that a node with many connections is not read whole.
func TestFlowFilter(t *testing.T) {
	newWire(t)
	var flows []flow
	for port := 50; port < 54; port++ {
		four := fmt.Sprintf("10.1.0.1:%d", port)
		flows = append(flows, flow{unix.IPPROTO_UDP, "203.0.113.1:1000", four, four})
	}
	track(t, flows)
	table, err := openConntrack()
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	for texts, want := range map[string]int{"udp 50 10.1.0.5:80": 1, "udp 50 10.1.0.5:80,udp 51 10.1.0.5:80": 4} {
		wanted := map[uint16][]HostPort{}
		for _, p := range portList(strings.Split(texts, ",")...) {
			wanted[p.Port] = []HostPort{p}
		}
		got := 0
		mustDo(t, table.walk(wanted, map[bool]bool{true: true}, func(udpFlow) { got++ }))
		if got != want {
			t.Errorf("%s: %d entries, want %d", texts, got, want)
		}
	}
}

// TestDelFlowsOfMany: a node with many connections does not tell of them all, for pods with both families.
func TestDelFlowsOfMany(t *testing.T) {
	w := newWire(t)
	mustDo(t, w.host.AddAddress(w.bridge, prefixes("10.1.0.1/24")[0], false))
	var flows []flow
	for i := range manyFlows {
		flows = append(flows, flow{unix.IPPROTO_TCP, fmt.Sprintf("203.0.113.1:%d", 1000+i), "10.1.0.1:80", "10.1.0.1:80"})
	}
	track(t, append(flows, flow{unix.IPPROTO_UDP, "203.0.113.1:1000", "10.1.0.1:53", "10.1.0.1:53"}))
	walked := walks(t)
	mustDo(t, w.host.DelFlows(portList("udp 53 10.1.0.5:5353", "udp 53 [fd00::5]:5353")))
	list := walked()
	slices.Sort(list)
	if diff := cmp.Diff([]string{"family=10 filtered=true error=<nil>", "family=2 filtered=true error=<nil>"}, list); diff != "" {
		t.Error(diff)
	}
	if got := tracked(t); len(got) != manyFlows {
		t.Errorf("%d are left", len(got))
	}
}
