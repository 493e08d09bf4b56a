// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/meter"
)

// TestMeasuredLimits: rates are in bits per second and bursts in bits, both in runtimeConfig and in the conflist. Ingress is the traffic to
// the pod, egress that from it.
func TestMeasuredLimits(t *testing.T) {
	a := harness.NewAlone(t)
	a.Warm(t)
	before := harness.Watch(t, a.Pod)
	const ingress, egress = 40, 20
	fromRuntime := a.Call("ADD", harness.Rates{Ingress: ingress, Egress: egress})
	conf := harness.RawObject(t, string(fromRuntime.Stdin))
	for title, add := range harness.InOrder(map[string]harness.Call{
		"C-111 limits of the runtime": fromRuntime,
		"C-111 limits of the conflist": fromRuntime.Config(conf.With("runtimeConfig", nil,
			"ingressRate", ingress*1_000_000, "ingressBurst", 400_000, "egressRate", egress*1_000_000, "egressBurst", 400_000)),
	}) {
		t.Run(title, func(t *testing.T) {
			add.Run(t).OK(t)
			measureLimit(t, a, "what the pod receives", ingress, meter.Flow{To: a.Pod.Do, Listen: netip.MustParseAddrPort(a.InPod + ":0")})
			measureLimit(t, a, "what the pod sends", egress, meter.Flow{From: a.Pod.Do, Listen: netip.MustParseAddrPort(a.Node + ":0")})
			add.With("CNI_COMMAND", "DEL").Run(t).OK(t)
		})
	}
	before.Clean(t, "limits were measured")
}

// measureLimit checks that the rate at the receiver is within 5 % of the limit, over UDP and TCP. The machine can pause unseen by the
// meter, so it measures up to five times. A wrong limit fails each time.
func measureLimit(t *testing.T, a *harness.Alone, what string, mbit float64, flow meter.Flow) {
	t.Helper()
	const runs, tolerance = 5, 0.05
	for _, flow.Protocol = range []meter.Protocol{meter.UDP, meter.TCP} {
		flow.Duration, flow.Rate, flow.Patience = 1500*time.Millisecond, 2e6*mbit, 30*time.Second
		var wrong []string
		right := false
		for run := 0; run < runs && !right; run++ {
			r, err := meter.Run(t.Context(), flow)
			if err != nil {
				t.Fatalf("%s, %s: %v", what, flow.Protocol, err)
			}
			low, high := r.Range(r.Mean.Wire/1e6/mbit, 0, r.Duration)
			right = low >= 1-tolerance && low <= 1+tolerance
			if low > 1+tolerance || high < 1-tolerance {
				wrong = append(wrong, fmt.Sprintf("%.2f Mbit/s with pauses of %v", r.Mean.Wire/1e6, r.Paused))
			}
		}
		switch {
		case len(wrong) == runs:
			t.Errorf("%s, %s: measured %s, want %.0f Mbit/s", what, flow.Protocol, strings.Join(wrong, ", "), mbit)
		case !right:
			t.Logf("slow machine: %s, %s: pauses explain the low rate of %d of %d runs", what, flow.Protocol, runs-len(wrong), runs)
		case len(wrong) > 0:
			t.Logf("%s, %s: before the right rate: %s", what, flow.Protocol, strings.Join(wrong, ", "))
		}
	}
}
