// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/ports"
)

// conntrackWalks returns a function that returns the dumps of the conntrack table since its last call, as found in the debug log: for
// example "family=2 filtered=true error=<nil>".
func conntrackWalks(t *testing.T) func() []string {
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

// delFlows deletes only entries that would keep a client of a mapped UDP port from the pod (F-38).
func TestDelFlows(t *testing.T) {
	h := newNode(t, "10.1.0.1/24", "fd00::1/64", "192.0.2.1/32")
	const udp, tcp = "17", "6"
	goes := []kerneltest.Flow{
		{udp, "203.0.113.1:1000", "10.1.0.1:53", "10.1.0.5:5353"},  // to the pod
		{udp, "203.0.113.1:1001", "10.1.0.1:53", "10.1.0.1:53"},    // to the node, before the port was mapped
		{udp, "203.0.113.1:1002", "192.0.2.1:53", "10.1.0.5:5353"}, // to another address of the node
		{udp, "203.0.113.1:1003", "192.0.2.1:54", "10.1.0.5:5454"}, // the port of one address
		{udp, "[fd99::1]:1000", "[fd00::1]:53", "[fd00::5]:5353"},  //
		{udp, "203.0.113.1:1004", "10.1.0.1:53", "10.1.0.5:9999"},  // to the pod, by an earlier mapping
		{udp, "127.0.0.1:1005", "127.0.0.9:53", "127.0.0.9:53"},    // all of 127.0.0.0/8 is local
		{udp, "[fd99::1]:1001", "[fd00::1]:65535", "[fd00::1]:65535"},
	}
	stays := []kerneltest.Flow{
		{udp, "203.0.113.1:2000", "10.1.0.1:55", "10.1.0.5:5353"},       // another port
		{udp, "203.0.113.1:2001", "198.51.100.1:53", "198.51.100.1:53"}, // forwarded: a pod's own request to a name server
		{udp, "203.0.113.1:2002", "10.1.0.1:53", "10.1.0.6:53"},         // to another pod
		{udp, "203.0.113.1:2003", "10.1.0.1:54", "10.1.0.5:5454"},       // not an address of the mapping
		{tcp, "203.0.113.1:2004", "10.1.0.1:53", "10.1.0.5:5353"},       // not UDP
		{udp, "[fd99::1]:2000", "[fd00::1]:54", "[fd00::5]:5454"},       // the other family has no such port
		{udp, "[fd99::1]:2001", "[fd00::1]:56", "[fd00::1]:56"},         // the port is not mapped
		{udp, "203.0.113.1:2005", "10.96.0.10:53", "10.1.0.5:5353"},     // to the pod, by a Service
		{udp, "203.0.113.1:2006", "10.1.0.5:53", "10.1.0.5:53"},         // to the pod itself
		{udp, "10.1.0.1:53", "203.0.113.1:2007", "203.0.113.1:2007"},    // from the port
		{udp, "203.0.113.1:2008", "10.1.0.1:5353", "10.1.0.5:5353"},     // to the pod's port by another node port
	}
	kerneltest.Track(t, append(slices.Clone(goes), stays...))
	before, walked := kerneltest.Tracked(t), conntrackWalks(t)
	kerneltest.Must(t, delFlows(h, portList("tcp 53 10.1.0.5:5353", "sctp 53 10.1.0.5:5353")), delFlows(h, nil))
	if diff := cmp.Diff(before, kerneltest.Tracked(t)); diff != "" || len(walked()) > 0 {
		t.Errorf("without UDP ports:\n%s", diff)
	}
	list := portList("udp 53 10.1.0.5:5353", "udp 192.0.2.1:54 10.1.0.5:5454", "udp 53 [fd00::5]:5353", "tcp 53 10.1.0.5:5353",
		"udp 65535 [fd00::5]:65535", "udp 56 10.1.0.5:80")
	for i := range uint16(300) {
		list = append(list, ports.Port{Protocol: "udp", Port: 10000 + i, To: netip.MustParseAddrPort("10.1.0.5:80")})
	}
	for range 2 {
		kerneltest.Must(t, delFlows(h, list))
		if got := walked(); len(got) != 1 {
			t.Errorf("%d walks for both families: %q", len(got), got)
		}
	}
	var want []string
	for _, f := range stays {
		want = append(want, strings.Join(f[:3], " "))
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, kerneltest.Tracked(t)); diff != "" {
		t.Errorf("left:\n%s", diff)
	}
}

// The kernel filters entries by address family, and for a single port also by port.
func TestDelFlowsOfOneFamily(t *testing.T) {
	h := newNode(t, "10.1.0.1/24", "fd00::1/64")
	var flows []kerneltest.Flow
	for port := 50; port < 54; port++ {
		four, six := fmt.Sprintf("10.1.0.1:%d", port), fmt.Sprintf("[fd00::1]:%d", port)
		flows = append(flows, kerneltest.Flow{"17", "203.0.113.1:1000", four, four}, kerneltest.Flow{"17", "[fd99::1]:1000", six, six},
			kerneltest.Flow{"6", "203.0.113.1:1000", four, four})
	}
	kerneltest.Track(t, flows)
	walked := conntrackWalks(t)
	left := len(flows)
	for _, x := range []struct {
		ports  []ports.Port
		family int
		gone   int
	}{
		{portList("udp 50 10.1.0.5:80"), unix.AF_INET, 1},
		{portList("udp 51 10.1.0.5:80", "udp 52 10.1.0.5:80", "tcp 53 10.1.0.5:80"), unix.AF_INET, 2},
		{portList("udp 50 [fd00::5]:80"), unix.AF_INET6, 1},
		{portList("udp 51 [fd00::5]:80", "udp 52 [fd00::5]:80"), unix.AF_INET6, 2},
	} {
		kerneltest.Must(t, delFlows(h, x.ports))
		left -= x.gone
		if got := kerneltest.Tracked(t); len(got) != left {
			t.Errorf("%v left %q", x.ports, got)
		}
		want := []string{fmt.Sprintf("family=%d filtered=true error=<nil>", x.family)}
		if diff := cmp.Diff(want, walked()); diff != "" {
			t.Errorf("%v:\n%s", x.ports, diff)
		}
	}
}

// manyFlows entries make a table that package kernel reads only with a filter.
const manyFlows = 3500

// delFlows does not read all connections of a busy node, even for a pod with both families.
func TestDelFlowsOfMany(t *testing.T) {
	h := newNode(t, "10.1.0.1/24")
	var flows []kerneltest.Flow
	for i := range manyFlows {
		flows = append(flows, kerneltest.Flow{"6", fmt.Sprintf("203.0.113.1:%d", 1000+i), "10.1.0.1:80", "10.1.0.1:80"})
	}
	kerneltest.Track(t, append(flows, kerneltest.Flow{"17", "203.0.113.1:1000", "10.1.0.1:53", "10.1.0.1:53"}))
	walked := conntrackWalks(t)
	kerneltest.Must(t, delFlows(h, portList("udp 53 10.1.0.5:5353", "udp 53 [fd00::5]:5353")))
	list := walked()
	slices.Sort(list)
	if diff := cmp.Diff([]string{"family=10 filtered=true error=<nil>", "family=2 filtered=true error=<nil>"}, list); diff != "" {
		t.Error(diff)
	}
	if got := kerneltest.Tracked(t); len(got) != manyFlows {
		t.Errorf("%d are left", len(got))
	}
}
