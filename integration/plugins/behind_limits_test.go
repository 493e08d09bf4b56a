// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// limitRate is the limit of both directions in Mbit/s.
const limitRate = 16

func bothLimits() map[string]any {
	const bits = limitRate * 1_000_000
	return map[string]any{"bandwidth": object{"ingressRate": bits, "ingressBurst": 1<<32 - 1, "egressRate": bits, "egressBurst": 1<<32 - 1}}
}

// ownBridge is the conflist of a node with Podlace's bridge.
const ownBridge = `{"cniVersion": "1.0.0", "name": "behind-bridge", "plugins": [
	{"type": "bridge", "bridge": "behind0", "isDefaultGateway": true,
	 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.100.0.0/24"}]]}},
	{"type": "bandwidth", "capabilities": {"bandwidth": true}}]}`

// Limits work in both directions after Podlace's bridge and after the reference plugin ptp. TestBehindKubernetesShaping covers pods whose
// addresses have no subnet, as with Calico.
func TestBehindLimits(t *testing.T) {
	for title, conflist := range harness.InOrder(map[string]string{"bridge": ownBridge, "ptp": readBehind(t, "ptp.conflist")}) {
		t.Run(title, func(t *testing.T) {
			b := behindOf(t, conflist, bothLimits())
			b.runLife(t, func() { checkLimitsHold(t, b.web, harness.IPv4Of(t, b.web), limitRate*1_000_000) })
		})
	}
}

// Limits work for a pod's virtual machine with bridge or ptp as the main plugin. Kata creates its tap and redirects between ADD and DEL.
func TestBehindKata(t *testing.T) {
	for title, conflist := range harness.InOrder(map[string]string{"bridge": ownBridge, "ptp": readBehind(t, "ptp.conflist")}) {
		t.Run(title, func(t *testing.T) {
			b := behindOf(t, conflist, bothLimits())
			b.Must(t, "ADD", b.rtWeb)
			vm := newKata(t, b.web)
			checkLimitsHold(t, vm.guest, harness.IPv4Of(t, b.web), limitRate*1_000_000)
			b.Must(t, "CHECK", b.rtWeb)
			b.Must(t, "DEL", b.rtWeb)
			vm.removeVM(t)
			b.oracle.Clean(t, "a virtual machine started and ended")
		})
	}
}

// TestKataLimits: bandwidth changes only the host-side veth. No verb changes what Kata created in the pod.
func TestKataLimits(t *testing.T) {
	a := harness.NewAlone(t)
	a.Warm(t)
	first := harness.Rates{Ingress: limitRate, Egress: limitRate}
	a.Must(t, "ADD", first)
	vm := newKata(t, a.Pod)
	reached := func(after string) {
		t.Helper()
		if err := harness.Ping(vm.guest, a.Node, harness.TrafficLimit); err != nil {
			t.Errorf("%s: no traffic: %v", after, err)
		}
	}
	inside := tcOf(t, a.Pod.Name, "eth0") + tcOf(t, a.Pod.Name, kataTap)
	if n := strings.Count(inside, "Egress Redirect to device"); n != 2 {
		t.Errorf("Kata has %d redirects: %s", n, inside)
	}
	checkLimitsHold(t, vm.guest, a.InPod, limitRate*1_000_000)
	a.Must(t, "DEL", first)
	reached("DEL of limits that were set before the virtual machine started")
	if now := tcOf(t, a.Pod.Name, "eth0") + tcOf(t, a.Pod.Name, kataTap); now != inside {
		t.Errorf("DEL left of Kata's\n%s\nwant\n%s", now, inside)
	}

	before := harness.Watch(t, a.Pod, vm.guest)
	for _, r := range []harness.Rates{first, {Ingress: 20, Egress: 40}, {Ingress: 0, Egress: 40}, first} {
		a.Must(t, "ADD", r)
		a.Must(t, "CHECK", r)
		if got, err := a.InEffect(); got != r || err != nil {
			t.Errorf("limits %+v, %v; want %+v", got, err, r)
		}
		reached(fmt.Sprintf("ADD with %+v", r))
	}
	checkLimitsHold(t, vm.guest, a.InPod, limitRate*1_000_000)
	a.Must(t, "DEL", first)
	reached("DEL")
	before.Clean(t, "limits beside a virtual machine")
}

// Each interface of a pod has its own limits, which DEL of another one leaves alone.
func TestSecondInterfaceLimits(t *testing.T) {
	a := harness.NewAlone(t)
	b := a.Second(t)
	a.Warm(t)
	b.Warm(t)
	before := harness.Watch(t, a.Pod)
	one, other := harness.Rates{Ingress: limitRate, Egress: limitRate}, harness.Rates{Ingress: 40, Egress: 32}
	a.Must(t, "ADD", one)
	b.Must(t, "ADD", other)
	checkLimitsHold(t, a.Pod, a.InPod, limitRate*1_000_000)
	checkLimitsHold(t, b.Pod, b.InPod, 32_000_000)
	a.Wants(t, one, "both have limits")
	b.Wants(t, other, "both have limits")
	b.Must(t, "ADD", harness.Rates{Ingress: 0, Egress: 8})
	a.Wants(t, one, "ADD again of the second")
	b.Wants(t, harness.Rates{Ingress: 0, Egress: 8}, "ADD again of the second")
	a.Must(t, "DEL", one)
	a.Wants(t, harness.Rates{}, "DEL of the first")
	b.Wants(t, harness.Rates{Ingress: 0, Egress: 8}, "DEL of the first")
	b.Must(t, "CHECK", harness.Rates{Ingress: 0, Egress: 8})
	b.Must(t, "DEL", harness.Rates{Ingress: 0, Egress: 8})
	b.Wants(t, harness.Rates{}, "DEL of the second")
	before.Clean(t, "two interfaces had limits")
}

// No verb removes other programs' qdiscs and filters on the host-side veth, whether older or newer than ADD.
func TestLimitsBesideOthers(t *testing.T) {
	harness.Program(t, "tc")
	const ingress = "tc filter add dev alone0 ingress pref 5 protocol ip u32 match ip dport 7777 0xffff flowid 1:7\n"
	const last = "tc filter add dev alone0 ingress protocol ip u32 match ip dport 7778 0xffff flowid 1:7\n"
	const egress = "tc filter add dev alone0 egress pref 5 protocol ip u32 match ip dport 7779 0xffff flowid 1:7\n"
	for title, c := range harness.InOrder(map[string]struct{ before, after string }{
		"an empty clsact before ADD":          {"tc qdisc add dev alone0 clsact", ""},
		"clsact with filters before ADD":      {"tc qdisc add dev alone0 clsact\n" + ingress + egress + last, ""},
		"clsact before ADD, filters after it": {"tc qdisc add dev alone0 clsact", ingress + egress + last},
		"ingress with filters before ADD":     {"tc qdisc add dev alone0 ingress\n" + ingress + last, ""},
		"filters after ADD":                   {"", ingress + last},
		"clsact with filters after ADD":       {"", "tc qdisc replace dev alone0 clsact\n" + ingress + egress + last},
	}) {
		t.Run(title, func(t *testing.T) {
			a := harness.NewAlone(t)
			a.Warm(t)
			harness.Shell(t, c.before)
			first, next := harness.Rates{Ingress: 20, Egress: 40}, harness.Rates{Ingress: 30, Egress: 10}
			a.Must(t, "ADD", first)
			harness.Shell(t, c.after)
			others := func() string {
				var list []string
				for line := range strings.Lines(tcOf(t, "", "alone0")) {
					if strings.Contains(line, "clsact") || strings.Contains(line, "pref 5 ") || strings.Contains(line, "1e6") ||
						strings.Contains(line, "49152") {
						list = append(list, strings.TrimSpace(line))
					}
				}
				return strings.Join(list, "\n")
			}
			want := others()
			if want == "" {
				t.Error("the other program's filters are missing")
			}
			mustStay := func(limits harness.Rates, after string) {
				t.Helper()
				if now := others(); now != want {
					t.Errorf("%s: the other program's qdiscs and filters are\n%s\nwant\n%s", after, now, want)
				}
				a.Wants(t, limits, after)
			}
			mustStay(first, "ADD")
			a.Must(t, "CHECK", first)
			a.Must(t, "ADD", next)
			mustStay(next, "ADD again")
			a.Must(t, "ADD", harness.Rates{Ingress: 30, Egress: 0})
			mustStay(harness.Rates{Ingress: 30, Egress: 0}, "ADD without egress")
			a.Must(t, "ADD", next)
			mustStay(next, "ADD with egress")
			a.Must(t, "CHECK", next)
			for range 2 {
				a.Must(t, "DEL", next)
				mustStay(harness.Rates{}, "DEL")
			}
		})
	}
}

// tcOf returns the output of tc(8) for a link, without counters and handles.
func tcOf(t testing.TB, netns, link string) string {
	t.Helper()
	in := ""
	if netns != "" {
		in = "-n " + netns + " "
	}
	text := harness.Shell(t, fmt.Sprintf("tc %[1]sqdisc show dev %[2]s; tc %[1]sfilter show dev %[2]s ingress", in, link))
	if strings.Contains(text, "clsact") { // tc shows an ingress qdisc's filters for egress too
		text += harness.Shell(t, fmt.Sprintf("tc %sfilter show dev %s egress", in, link))
	}
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "index ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}
