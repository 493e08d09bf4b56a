// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// run runs a shell command on the node, with the words of named.
func (a attached) run(command string) error {
	command = a.named(command)
	out, err := exec.Command("sh", "-ec", command).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, out)
	}
	return nil
}

// named replaces HOST by the name of the pod's host-side veth, PODMAC by the pod's MAC, and V4 and V6 by the pod's addresses.
func (a attached) named(text string) string {
	var words []string
	if len(a.result.Interfaces) > 1 {
		words = append(words, "HOST", a.hostVeth(), "PODMAC", a.result.Interfaces[2].Mac)
	}
	for i, ip := range a.result.IPs {
		words = append(words, fmt.Sprint("V", 4+2*i), ip.Address.IP.String())
	}
	return strings.NewReplacer(words...).Replace(text)
}

func (a attached) runInPod(command string) error {
	return a.Pod.Do(func() error { return a.run(command) })
}

// damage is a shell command that disconnects or exposes pods, and what CHECK's error must then contain.
type damage struct {
	command  string
	says     string
	restored string // verbs that restore it: "STATUS GC", "GC" or ""
	repair   string // command that repairs the damage if no verb does
}

// damages returns changes on the node by title, each of which disconnects or exposes the pods on bridge btn0. They have hairpinMode.
func damages() map[string]damage {
	const all, byGC = "STATUS GC", "GC"
	refuses := func(route string) damage {
		return damage{"ip route add " + route, "the node has no route to " + route[len(route)-2:] + ", or one that refuses packets", "",
			"ip route del " + route}
	}
	return map[string]damage{
		"IPv4 forwarding off": {"sysctl -qw net.ipv4.ip_forward=0", "the node does not forward IPv4 (net.ipv4.ip_forward=0)", all, ""},
		"bridge down":         {"ip link set btn0 down", "bridge btn0 is down", byGC, ""},
		"IPv6 forwarding off": {"sysctl -qw net.ipv6.conf.all.forwarding=0",
			"the node does not forward IPv6 (net.ipv6.conf.all.forwarding=0)", all, ""},
		"IPv6 of the bridge off": {"sysctl -qw net.ipv6.conf.btn0.disable_ipv6=1", "gateway address fd00:61::1/64 is missing", all, ""},
		"IPv4 gateway":           {"ip addr del 10.61.0.1/24 dev btn0", "gateway address 10.61.0.1/24 is missing on btn0", all, ""},
		"IPv6 gateway":           {"ip addr del fd00:61::1/64 dev btn0", "gateway address fd00:61::1/64 is missing on btn0", all, ""},
		"IPv4 route":             {"ip route del 10.61.0.0/24 dev btn0", "the node has no route to V4", all, ""},
		"IPv6 route":             {"ip route del fd00:61::/64 dev btn0", "the node has no route to V6", all, ""},
		"IPv4 route beside a default route": {"ip link add up0 type veth; ip link set up0 up; ip route add default dev up0; " +
			"ip route del 10.61.0.0/24 dev btn0", "the node sends packets for V4 through up0, not through btn0", all, "ip link del up0"},
		"IPv6 route beside a default route": {"ip link add up0 type veth; ip link set up0 up; ip route add default dev up0 metric 9; " +
			"ip -6 route add default dev up0 metric 9; ip route del fd00:61::/64 dev btn0",
			"the node sends packets for V6 through up0, not through btn0", all, "ip link del up0"},
		"IPv4 blackhole": refuses("blackhole V4"), "IPv4 unreachable": refuses("unreachable V4"), "IPv4 prohibit": refuses("prohibit V4"),
		"IPv6 blackhole": refuses("blackhole V6"), "IPv6 unreachable": refuses("unreachable V6"), "IPv6 prohibit": refuses("prohibit V6"),
		"IPv4 address on the node": {"ip addr add V4/32 dev lo", "the node sends packets for V4 through lo", "", "ip addr del V4/32 dev lo"},
		"IPv4 route elsewhere": {"ip link add up0 type veth; ip link set up0 up; ip route add V4 dev up0",
			"the node sends packets for V4 through up0, not through btn0", "", "ip link del up0"},
		"port disabled":       {"bridge link set dev HOST state 0", "port HOST of btn0 is disabled", "", ""},
		"port listening":      {"bridge link set dev HOST state 1", "port HOST of btn0 is listening", "", ""},
		"port locked":         {"bridge link set dev HOST locked on", "locked true", byGC, ""},
		"unicast flood off":   {"bridge link set dev HOST flood off", "flood false", byGC, ""},
		"multicast flood off": {"bridge link set dev HOST mcast_flood off", "mcast_flood false", byGC, ""},
		"broadcast flood off": {"bridge link set dev HOST bcast_flood off", "bcast_flood false", byGC, ""},
		"hairpin off":         {"bridge link set dev HOST hairpin off", "has hairpin false, want hairpin true", byGC, ""},
		"isolated":            {"bridge link set dev HOST isolated on", "has isolated true, want isolated false", byGC, ""},
		"learning off":        {"bridge link set dev HOST learning off", "learning false", byGC, ""},
		"forwarding database": {"bridge fdb flush dev btn0", "btn0 lacks its own MAC in its forwarding database", all, ""},
		"own MAC at a port": {"bridge fdb replace $(cat /sys/class/net/btn0/address) dev HOST master static",
			"btn0 lacks its own MAC in its forwarding database", all, ""},
		"fixed entry for the pod": {"bridge fdb replace PODMAC dev btn0 self permanent", "leads frames for the pod's MAC PODMAC away from HOST", "",
			"bridge fdb del PODMAC dev btn0 self"},
		"arp_ignore": {"sysctl -qw net.ipv4.conf.btn0.arp_ignore=8", "btn0 does not answer ARP requests", "",
			"sysctl -qw net.ipv4.conf.btn0.arp_ignore=0"},
		"IPv4 neighbour": {"ip neigh replace V4 lladdr 02:00:00:00:00:99 dev btn0 nud permanent",
			"leads the node's packets for V4 to 02:00:00:00:00:99", "", "ip neigh del V4 dev btn0"},
		"IPv6 neighbour": {"ip neigh replace V6 lladdr 02:00:00:00:00:99 dev btn0 nud permanent",
			"leads the node's packets for V6 to 02:00:00:00:00:99", "", "ip neigh del V6 dev btn0"},
		"ARP off": {"ip link set btn0 arp off", "btn0 does not answer ARP requests", "", "ip link set btn0 arp on"},
		"host side renamed": {"ip link set HOST down; ip link set HOST name renamed0; ip link set renamed0 up",
			"the host side of eth0 is renamed0, want HOST", "", "ip link set renamed0 down; ip link set renamed0 name HOST; ip link set HOST up"},
	}
}

// nodeLab returns a lab with subnets that no other bridge uses.
func nodeLab(t *testing.T, keys ...any) lab {
	t.Helper()
	return newLab(t, append([]any{"name", "node", "bridge", "btn0", "ipam", hostLocal("10.61.0.0/24", "fd00:61::/64").With("routes",
		[]any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}})}, keys...)...)
}

// TestCheckDetectsNode (C-61, C-62): CHECK reports each of the damages. CRI-O calls STATUS and GC before CHECK, so both repair them.
func TestCheckDetectsNode(t *testing.T) {
	kerneltest.Slow(t)
	l := nodeLab(t)
	for what, d := range damages() {
		l.Run(what, func(t *testing.T) {
			own := l
			own.T, own.Pod = t, kerneltest.NewPod(t)
			own.mustReport(d)
		})
	}
}

// mustReport causes damage that CHECK must report, and that each operation in restored must repair.
func (l lab) mustReport(d damage) {
	l.Helper()
	a := l.add("a")
	l.OK(a.check())
	verbs := strings.Fields(d.restored)
	for _, verb := range append(slices.Clone(verbs), "") {
		if verb == "" && len(verbs) > 0 {
			return
		}
		if err := a.run(d.command); err != nil {
			l.Fatal(err)
		}
		l.Fails(a.check(), plugin.CodeStateDiffers, a.named(d.says))
		if verb != "" {
			a.mustRestore(verb)
		}
		if d.repair != "" {
			if err := a.run(d.repair); err != nil {
				l.Fatal(err)
			}
			l.OK(a.check())
		}
	}
}

// mustRestore expects a CNI operation to repair the damage and log this once, and a second call to find nothing.
func (a attached) mustRestore(verb string) {
	a.Helper()
	keys := []any{"cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}}
	if o := a.OK(a.Call(verb, "", keys...)); !strings.Contains(o.Log, "restored") {
		a.Errorf("%s does not log it: %s", verb, o.Log)
	}
	if o := a.check(); o.Exit != 0 {
		a.Errorf("after %s: CHECK: %s", verb, o.Stdout)
	}
	if o := a.OK(a.Call(verb, "", keys...)); strings.Contains(o.Log, "restored") {
		a.Errorf("the next %s restores state that exists: %s", verb, o.Log)
	}
}

// toleratedChanges returns what a tenant may change in its own pod, and an admin on Podlace's bridge. CHECK logs these changes, but fails
// only with strictCheck. A command runs in the pod, or on the node if it begins with "node:".
func toleratedChanges() map[string]struct{ command, says, repair string } {
	return map[string]struct{ command, says, repair string }{
		"MTU":                   {"ip link set eth0 mtu 1400", "eth0 has mtu 1400 in the pod, less than the 1500 of its host side", ""},
		"router advertisements": {"sysctl -qw net.ipv6.conf.eth0.accept_ra=2", "eth0 accepts router advertisements", ""},
		"IPv4 on-link route":    {"ip route del 10.61.0.0/24 dev eth0", "eth0 has no on-link route to the gateway 10.61.0.1", ""},
		"IPv6 on-link route":    {"ip route del fd00:61::/64 dev eth0", "eth0 has no on-link route to the gateway fd00:61::1", ""},
		"MTU of the bridge": {"node:ip link set btn0 mtu 9000", "btn0 has mtu 9000, more than the 1500 of the pod",
			"node:ip link set btn0 mtu 1500"},
		"nf_call_iptables": {"node:ip link set btn0 type bridge nf_call_iptables 0", "nf_call_iptables or nf_call_ip6tables of btn0 is off",
			"node:ip link set btn0 type bridge nf_call_iptables 1"},
		"nf_call_ip6tables": {"node:ip link set btn0 type bridge nf_call_ip6tables 0", "nf_call_iptables or nf_call_ip6tables of btn0 is off",
			"node:ip link set btn0 type bridge nf_call_ip6tables 1"},
		"spanning tree": {"node:ip link set btn0 type bridge stp_state 1", "stp_state of btn0 is 1",
			"node:ip link set btn0 type bridge stp_state 0"},
		"ageing time": {"node:ip link set btn0 type bridge ageing_time 0", "ageing_time of btn0 is 0",
			"node:ip link set btn0 type bridge ageing_time 30000"},
		"forwarding of the bridge": {"node:sysctl -qw net.ipv4.conf.btn0.forwarding=0",
			"btn0 does not forward IPv4 (net.ipv4.conf.btn0.forwarding=0)", "node:sysctl -qw net.ipv4.conf.btn0.forwarding=1"},
		"overlapping subnet": {"node:ip link add up0 type veth; ip link set up0 up; ip addr add 10.61.0.126/25 dev up0",
			"the node sends packets for V4 through up0", "node:ip link del up0"},
	}
}

func (a attached) runEither(command string) error {
	if onNode, is := strings.CutPrefix(command, "node:"); is || command == "" {
		return a.run(onNode)
	}
	return a.runInPod(command)
}

// TestStrictCheck (C-66): CHECK fails for the tolerated changes only if strictCheck is set.
func TestStrictCheck(t *testing.T) {
	kerneltest.Slow(t)
	l := nodeLab(t, "mtu", 1500)
	for what, h := range toleratedChanges() {
		l.Run(what, func(t *testing.T) {
			own := l
			own.T, own.Pod = t, kerneltest.NewPod(t)
			a := own.add("a")
			if o := own.OK(a.check("strictCheck", true)); o.Log != "" {
				t.Errorf("log of a healthy pod: %s", o.Log)
			}
			if err := a.runEither(h.command); err != nil {
				t.Fatal(err)
			}
			says := strings.Replace(h.says, "V4", a.result.IPs[0].Address.IP.String(), 1)
			if o := own.OK(a.check()); !strings.Contains(o.Log, "level=WARN") || !strings.Contains(o.Log, says) {
				t.Errorf("log: %s, want %q", o.Log, says)
			}
			own.Fails(a.check("strictCheck", true), plugin.CodeStateDiffers, says)
			if err := a.runEither(h.repair); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestCheckWithoutRecords (C-61, C-62): after all records were lost, CHECK still compares the kernel with prevResult and configuration.
func TestCheckWithoutRecords(t *testing.T) {
	kerneltest.Slow(t)
	l := nodeLab(t)
	for what, d := range damages() {
		l.Run(what, func(t *testing.T) {
			own := l
			own.T, own.Pod = t, kerneltest.NewPod(t)
			a := own.add("a")
			kept := t.TempDir()
			if err := errors.Join(a.run("cp -a /run/podlace/. "+kept+"; find /run/podlace -type f -delete"), a.run(d.command)); err != nil {
				t.Fatal(err)
			}
			own.Fails(a.check(), plugin.CodeStateDiffers, a.named(d.says)) // the missing record alone is an error too
			if err := errors.Join(a.run("cp -a "+kept+"/. /run/podlace"), os.RemoveAll(kept), a.run(d.repair)); err != nil {
				t.Fatal(err)
			}
			own.OK(own.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
		})
	}
}

// TestStatusOfDownBridge: after an admin set the bridge down, STATUS changes and logs nothing, however often it is called.
func TestStatusOfDownBridge(t *testing.T) {
	a := nodeLab(t).add("a")
	defer func() {
		if err := a.run("ip link set btn0 up"); err != nil {
			t.Error(err)
		}
		a.OK(a.Call("STATUS", ""))
		a.OK(a.check())
	}()
	if err := a.run("ip link set btn0 down"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if o := a.OK(a.Call("STATUS", "")); o.Log != "" {
			t.Errorf("log: %s", o.Log)
		}
	}
}
