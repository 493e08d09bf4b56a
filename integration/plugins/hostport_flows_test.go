// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
)

// mostMemory is the most that a verb may hold at once, in MiB. The reference plugin needs 95 beside 200,000 stale flows.
const mostMemory = 90

// TestMemoryBesideFlows: the memory of ADD and DEL of a UDP hostPort does not grow with the number of stale flows, and other flows stay.
func TestMemoryBesideFlows(t *testing.T) {
	f := harness.NewFixture(t, "portmap")
	const count = 50_000
	mapped := harness.Ports(harness.Port(8080, 80, "udp"), harness.Port(8081, 81, "udp")) // the kernel filters by one port at most
	run := func(verb string) (mebibytes int64) {
		t.Helper()
		debug.FreeOSMemory() // a new process counts the memory of the test process
		o := f.Good(verb, "portmap").Config(f.Conf("portmap").With("runtimeConfig.portMappings", mapped)).Run(t).OK(t)
		t.Logf("%s: %d MiB, %s of CPU", verb, o.PeakMemory>>20, o.CPU)
		return o.PeakMemory >> 20
	}
	for _, c := range []struct {
		port  uint16
		stale bool
	}{{8080, true}, {9090, false}} {
		for _, verb := range []string{"ADD", "DEL"} {
			trackMany(t, count, c.port)
			if took := run(verb); c.stale && took > mostMemory { // flows that stay take too little memory to tell
				t.Errorf("%s takes %d MiB, want at most %d", verb, took, mostMemory)
			}
			text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
			left, _ := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil || c.stale != (left < count) {
				t.Errorf("%s: %d flows to port %d are left, %v", verb, left, c.port, err)
			}
		}
	}
}

// trackMany replaces the connection tracking table by UDP flows to a port of the node that the node itself answers.
func trackMany(t *testing.T, count int, port uint16) {
	t.Helper()
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		t.Fatal(err)
	}
	client, node := netip.MustParseAddr("203.0.113.0"), netip.MustParseAddr("10.70.0.1")
	for i := range count {
		if i%50_000 == 0 {
			client = client.Next()
		}
		from := netip.AddrPortFrom(client, uint16(1024+i%50_000))
		there := netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: client.AsSlice(), DstIP: node.AsSlice(), SrcPort: from.Port(), DstPort: port}
		back := netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: node.AsSlice(), DstIP: client.AsSlice(), SrcPort: port, DstPort: from.Port()}
		flow := &netlink.ConntrackFlow{FamilyType: unix.AF_INET, Forward: there, Reverse: back, TimeOut: 600}
		if err := h.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow); err != nil {
			t.Fatal(fmt.Errorf("flow %d: %w", i, err))
		}
	}
}
