// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"net/netip"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/meter"
)

// TestLimitsMeasured: rates are bits per second, bursts are bits, and the directions are those that the pod sees, whether the runtime gives
// the limits or the conflist.
func TestLimitsMeasured(t *testing.T) {
	a := newAlone(t)
	a.warm(t)
	before := watch(t, a.pod)
	const ingress, egress = 40, 20
	fromRuntime := a.call("ADD", rates{ingress, egress})
	conf := rawObject(t, string(fromRuntime.stdin))
	for title, add := range inOrder(map[string]call{
		"C-111 limits of the runtime": fromRuntime,
		"C-111 limits of the conflist": fromRuntime.config(conf.with("runtimeConfig", nil,
			"ingressRate", ingress*1_000_000, "ingressBurst", 400_000, "egressRate", egress*1_000_000, "egressBurst", 400_000)),
	}) {
		t.Run(title, func(t *testing.T) {
			add.run(t).ok(t)
			a.measure(t, "what the pod receives", ingress, meter.Flow{To: a.pod.Do, Listen: netip.MustParseAddrPort(a.inPod + ":0")})
			a.measure(t, "what the pod sends", egress, meter.Flow{From: a.pod.Do, Listen: netip.MustParseAddrPort(a.node + ":0")})
			add.with("CNI_COMMAND", "DEL").run(t).ok(t)
		})
	}
	before.clean(t, "limits were measured")
}

// measure wants the rate within 5 % at the receiver, by UDP and by TCP. No run may exceed the limit, and none may stay below it unless pauses
// of the machine explain it; then the next run is tried.
func (a *alone) measure(t *testing.T, what string, mbit float64, flow meter.Flow) {
	t.Helper()
	const runs, tolerance = 5, 0.05
	for _, flow.Protocol = range []meter.Protocol{meter.UDP, meter.TCP} {
		flow.Duration, flow.Rate, flow.Patience = 1500*time.Millisecond, 2e6*mbit, 30*time.Second
		right := false
		for run := 0; run < runs && !right; run++ {
			r, err := meter.Run(t.Context(), flow)
			if err != nil {
				t.Fatalf("%s, %s: %v", what, flow.Protocol, err)
			}
			low, high := r.Range(r.Mean.Wire/1e6/mbit, 0, r.Duration)
			if low > 1+tolerance || high < 1-tolerance {
				t.Errorf("%s, %s: measured %.2f Mbit/s with pauses of %v, want %.0f Mbit/s", what, flow.Protocol, r.Mean.Wire/1e6, r.Paused, mbit)
			}
			right = low >= 1-tolerance
		}
		if !right {
			t.Logf("slow machine: %s, %s: its pauses explain the low rate of all %d runs", what, flow.Protocol, runs)
		}
	}
}
