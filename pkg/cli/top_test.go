// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/reconcile"
)

// TestTraffic: what the host side sends, the pod receives. A counter that decreases counts as zero.
func TestTraffic(t *testing.T) {
	a := &reconcile.Attachment{Network: "n", Pod: "ns/p", ContainerID: "c", IfName: "eth0", IngressRate: 10e6}
	before := counters{"rx_bytes": 1000, "tx_bytes": 2000, "rx_packets": 10, "tx_packets": 20, "tx_dropped": 5}
	after := counters{"rx_bytes": 3000, "tx_bytes": 1252000, "rx_packets": 30, "tx_packets": 1020, "tx_dropped": 8}
	want := traffic{Key: a.Key(), Pod: "ns/p",
		Ingress: flow{Rate: 5e6, Packets: 500, Dropped: 3, Limit: 10e6}, Egress: flow{Rate: 8000, Packets: 10}}
	got := trafficOf(a, before, after, 2*time.Second)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if back := trafficOf(a, after, before, time.Second); back.Ingress.Rate != 0 || back.Ingress.Dropped != 0 {
		t.Errorf("counters went back: %+v", back)
	}
	var out bytes.Buffer
	printTraffic(&out, []traffic{got})
	lines := strings.Split(out.String(), "\n")
	if fields := strings.Fields(lines[1]); strings.Join(fields, " ") != "n ns/p c eth0 5Mbit/s 10Mbit/s 50% 3 8kbit/s - - 0" {
		t.Errorf("%q", fields)
	}
}

// TestTopOrders: the largest value is first, and names are in alphabetical order.
func TestTopOrders(t *testing.T) {
	small := traffic{Pod: "b", Ingress: flow{Rate: 1, Dropped: 2}, Egress: flow{Rate: 9}}
	large := traffic{Pod: "a", Ingress: flow{Rate: 5}, Egress: flow{Rate: 2, Dropped: 1}}
	for name, first := range map[string]traffic{"ingress": large, "egress": small, "total": small, "drops": small, "pod": large} {
		other := small
		if first == small {
			other = large
		}
		if topOrder(name)(first, other) >= 0 {
			t.Errorf("%s: %s is not first", name, first.Pod)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the rest is root's")
	}
	for _, args := range [][]string{{"top", "--sort", "rate"}, {"top", "--interval", "1ms"}} {
		if status, _, stderr := run(args...); status != exitFailed || !strings.Contains(stderr, args[1]) {
			t.Errorf("%q: status %d, %q", args, status, stderr)
		}
	}
}
