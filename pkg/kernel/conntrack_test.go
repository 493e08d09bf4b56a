// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestDelFlowsAnswered (F-38): DelUDP also deletes the reversed entry that a reply in flight creates, but not one of the client's next
// datagram.
func TestDelFlowsAnswered(t *testing.T) {
	newWire(t)
	const udp = "17"
	old := []kerneltest.Flow{{udp, "203.0.113.1:1000", "10.1.0.1:53", "10.1.0.1:53"}, {udp, "[fd99::1]:1000", "[fd00::1]:53", "[fd00::1]:53"},
		{udp, "203.0.113.1:1001", "10.1.0.1:53", "10.1.0.1:53"}}
	now := []kerneltest.Flow{{udp, "10.1.0.1:53", "203.0.113.1:1000", "203.0.113.1:1000"},
		{udp, "[fd00::1]:53", "[fd99::1]:1000", "[fd99::1]:1000"},
		{udp, "203.0.113.1:1001", "10.1.0.1:53", "10.1.0.5:5353"}}
	kerneltest.Track(t, old)
	table, err := OpenConntrack()
	kerneltest.Must(t, err)
	defer table.Close()
	var stale []UDPFlow
	kerneltest.Must(t, table.dump(unix.AF_UNSPEC, nil, func(f UDPFlow) error {
		f, _ = parseFlow(bytes.Clone(f.message))
		stale = append(stale, f)
		return nil
	}),
		netlink.ConntrackTableFlush(netlink.ConntrackTable))
	kerneltest.Track(t, now)
	reversed, err := table.reversedEntries(stale)
	kerneltest.Must(t, err, table.del(reversed))
	if diff := cmp.Diff([]string{"17 203.0.113.1:1001 10.1.0.1:53"}, kerneltest.Tracked(t)); diff != "" || len(stale) != len(old) {
		t.Errorf("of %d:\n%s", len(stale), diff)
	}
}

// TestFlowFilter: the kernel applies the attributes of udpFilter, without which walkUDP would receive all connections of a busy node.
func TestFlowFilter(t *testing.T) {
	newWire(t)
	var flows []kerneltest.Flow
	for port := 50; port < 54; port++ {
		four := fmt.Sprintf("10.1.0.1:%d", port)
		flows = append(flows, kerneltest.Flow{"17", "203.0.113.1:1000", four, four})
	}
	kerneltest.Track(t, flows)
	table, err := OpenConntrack()
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	for want, ports := range map[int][]uint16{1: {50}, 4: {50, 51}} {
		got := 0
		kerneltest.Must(t, table.walkUDP(ports, []bool{true}, func(UDPFlow) error { got++; return nil }))
		if got != want {
			t.Errorf("%d: %d entries, want %d", ports, got, want)
		}
	}
}
