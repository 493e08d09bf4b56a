// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"math"
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

// measure wants the rate within 5 % at the receiver, by UDP and by TCP. A machine that has no time for a test can spoil a measurement, so
// one that is right is enough; a limit that is wrong spoils all.
func (a *alone) measure(t *testing.T, what string, mbit float64, flow meter.Flow) {
	t.Helper()
	for _, flow.Protocol = range []meter.Protocol{meter.UDP, meter.TCP} {
		flow.Duration, flow.Rate = 1500*time.Millisecond, 2e6*mbit
		var seen []string
		for range 5 {
			r, err := meter.Run(t.Context(), flow)
			if err == nil && math.Abs(r.Mean.Wire/1e6-mbit) <= mbit/20 {
				seen = nil
				break
			}
			seen = append(seen, fmt.Sprintf("%.2f Mbit/s %v", r.Mean.Wire/1e6, err))
		}
		if seen != nil {
			t.Errorf("%s, %s: measured %q, want %.0f Mbit/s", what, flow.Protocol, seen, mbit)
		}
	}
}
