// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"strings"
	"testing"
)

// limitRate is in Mbit/s, for both directions.
const limitRate = 16

func bothLimits() map[string]any {
	const bits = limitRate * 1_000_000
	return map[string]any{"bandwidth": object{"ingressRate": bits, "ingressBurst": 1<<32 - 1, "egressRate": bits, "egressBurst": 1<<32 - 1}}
}

// ownBridge is the list of a node whose pods the bridge connects.
const ownBridge = `{"cniVersion": "1.0.0", "name": "behind-bridge", "plugins": [
	{"type": "bridge", "bridge": "behind0", "isDefaultGateway": true,
	 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.77.0.0/24"}]]}},
	{"type": "bandwidth", "capabilities": {"bandwidth": true}}]}`

// TestBehindLimits: limits hold in both directions behind bridge and the reference's ptp. TestBehindKubernetesShaping is the same for
// addresses without a subnet, as Calico gives them.
func TestBehindLimits(t *testing.T) {
	for title, conflist := range inOrder(map[string]string{"bridge": ownBridge, "ptp": readBehind(t, "ptp.conflist")}) {
		t.Run(title, func(t *testing.T) {
			b := behindOf(t, conflist, bothLimits())
			b.life(t, func() { limitsHold(t, b.web, ipv4Of(t, b.web), limitRate*1_000_000) })
		})
	}
}

// TestBehindKata: limits hold for the virtual machine of a pod behind bridge and ptp. Kata makes its tap and the redirects between ADD and DEL.
func TestBehindKata(t *testing.T) {
	for title, conflist := range inOrder(map[string]string{"bridge": ownBridge, "ptp": readBehind(t, "ptp.conflist")}) {
		t.Run(title, func(t *testing.T) {
			b := behindOf(t, conflist, bothLimits())
			b.must(t, "ADD", b.rtWeb)
			vm := newKata(t, b.web)
			limitsHold(t, vm.guest, ipv4Of(t, b.web), limitRate*1_000_000)
			b.must(t, "CHECK", b.rtWeb)
			b.must(t, "DEL", b.rtWeb)
			vm.end(t)
			b.oracle.clean(t, "a virtual machine came and went")
		})
	}
}

// TestKataLimits: bandwidth works on the node's end alone. What Kata has made in the pod is as it was after each verb.
func TestKataLimits(t *testing.T) {
	a := newAlone(t)
	a.warm(t)
	first := rates{limitRate, limitRate}
	a.must(t, "ADD", first)
	vm := newKata(t, a.pod)
	reached := func(after string) {
		t.Helper()
		if err := ping(vm.guest, a.node, trafficLimit); err != nil {
			t.Errorf("%s: no traffic: %v", after, err)
		}
	}
	inside := tcOf(t, a.pod.Name, "eth0") + tcOf(t, a.pod.Name, kataTap)
	if n := strings.Count(inside, "Egress Redirect to device"); n != 2 {
		t.Errorf("Kata has %d redirects: %s", n, inside)
	}
	limitsHold(t, vm.guest, a.inPod, limitRate*1_000_000)
	a.must(t, "DEL", first)
	reached("DEL of limits that are older than the virtual machine")
	if now := tcOf(t, a.pod.Name, "eth0") + tcOf(t, a.pod.Name, kataTap); now != inside {
		t.Errorf("DEL left of Kata's\n%s\nwant\n%s", now, inside)
	}

	before := watch(t, a.pod, vm.guest)
	for _, r := range []rates{first, {20, 40}, {0, 40}, first} {
		a.must(t, "ADD", r)
		a.must(t, "CHECK", r)
		if got, err := a.inEffect(); got != r || err != nil {
			t.Errorf("limits %+v, %v; want %+v", got, err, r)
		}
		reached(fmt.Sprintf("ADD with %+v", r))
	}
	limitsHold(t, vm.guest, a.inPod, limitRate*1_000_000)
	a.must(t, "DEL", first)
	reached("DEL")
	before.clean(t, "limits beside a virtual machine")
}

// TestSecondInterfaceLimits: each interface of a pod has its own limits, and DEL of one leaves those of the other.
func TestSecondInterfaceLimits(t *testing.T) {
	a := newAlone(t)
	b := a.second(t)
	a.warm(t)
	b.warm(t)
	before := watch(t, a.pod)
	one, other := rates{limitRate, limitRate}, rates{40, 32}
	a.must(t, "ADD", one)
	b.must(t, "ADD", other)
	limitsHold(t, a.pod, a.inPod, limitRate*1_000_000)
	limitsHold(t, b.pod, b.inPod, 32_000_000)
	a.wants(t, one, "both have limits")
	b.wants(t, other, "both have limits")
	b.must(t, "ADD", rates{0, 8})
	a.wants(t, one, "ADD again of the second")
	b.wants(t, rates{0, 8}, "ADD again of the second")
	a.must(t, "DEL", one)
	a.wants(t, rates{}, "DEL of the first")
	b.wants(t, rates{0, 8}, "DEL of the first")
	b.must(t, "CHECK", rates{0, 8})
	b.must(t, "DEL", rates{0, 8})
	b.wants(t, rates{}, "DEL of the second")
	before.clean(t, "two interfaces had limits")
}

// TestLimitsBesideOthers: what other programs have on the node's end of the link, from before ADD or from after it, stays through all verbs.
func TestLimitsBesideOthers(t *testing.T) {
	program(t, "tc")
	const ingress = "tc filter add dev alone0 ingress pref 5 protocol ip u32 match ip dport 7777 0xffff flowid 1:7\n"
	const last = "tc filter add dev alone0 ingress protocol ip u32 match ip dport 7778 0xffff flowid 1:7\n"
	const egress = "tc filter add dev alone0 egress pref 5 protocol ip u32 match ip dport 7779 0xffff flowid 1:7\n"
	for title, c := range inOrder(map[string]struct{ before, after string }{
		"an empty clsact before ADD":          {"tc qdisc add dev alone0 clsact", ""},
		"clsact with filters before ADD":      {"tc qdisc add dev alone0 clsact\n" + ingress + egress + last, ""},
		"clsact before ADD, filters after it": {"tc qdisc add dev alone0 clsact", ingress + egress + last},
		"ingress with filters before ADD":     {"tc qdisc add dev alone0 ingress\n" + ingress + last, ""},
		"filters after ADD":                   {"", ingress + last},
		"clsact with filters after ADD":       {"", "tc qdisc replace dev alone0 clsact\n" + ingress + egress + last},
	}) {
		t.Run(title, func(t *testing.T) {
			a := newAlone(t)
			a.warm(t)
			shell(t, c.before)
			first, next := rates{20, 40}, rates{30, 10}
			a.must(t, "ADD", first)
			shell(t, c.after)
			others := func() string {
				var list []string
				for line := range strings.Lines(tcOf(t, "", "alone0")) {
					if strings.Contains(line, "clsact") || strings.Contains(line, "pref 5 ") || strings.Contains(line, "1e6") || strings.Contains(line, "49152") {
						list = append(list, strings.TrimSpace(line))
					}
				}
				return strings.Join(list, "\n")
			}
			want := others()
			if want == "" {
				t.Error("what the others made is not found")
			}
			mustStay := func(limits rates, after string) {
				t.Helper()
				if now := others(); now != want {
					t.Errorf("%s: others have\n%s\nwant\n%s", after, now, want)
				}
				a.wants(t, limits, after)
			}
			mustStay(first, "ADD")
			a.must(t, "CHECK", first)
			a.must(t, "ADD", next)
			mustStay(next, "ADD again")
			a.must(t, "ADD", rates{30, 0})
			mustStay(rates{30, 0}, "ADD without egress")
			a.must(t, "ADD", next)
			mustStay(next, "ADD with egress")
			a.must(t, "CHECK", next)
			for range 2 {
				a.must(t, "DEL", next)
				mustStay(rates{}, "DEL")
			}
		})
	}
}
