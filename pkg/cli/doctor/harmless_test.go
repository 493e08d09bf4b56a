// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/kernel"
)

// faulty returns changes of a node with a pod, each of which makes doctor print a remedy that this test can run.
func faulty() map[string]func(lab) {
	veth := attachment.Key{Network: "pods", ContainerID: "web", IfName: "eth0"}.HostVeth()
	shell := func(script string) func(lab) { return func(l lab) { l.command("sh", "-c", script) } }
	return map[string]func(lab){
		"no IPv4 forwarding":      shell("sysctl -qw net.ipv4.ip_forward=0"),
		"no IPv6 forwarding":      shell("sysctl -qw net.ipv6.conf.all.forwarding=0 net.ipv6.conf.lan1.accept_ra=1"),
		"no forwarding of bridge": shell("sysctl -qw net.ipv4.conf.cnidoc.forwarding=0"),
		"advertisements ignored":  shell("sysctl -qw net.ipv6.conf.lan1.accept_ra=1"),
		"writable":                func(l lab) { kerneltest.Must(l.t, os.Chmod(l.ConfDir+"/10-podlace.conflist", 0o666)) },
		"strict filter":           shell("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.lan1.rp_filter=1 net.ipv4.conf.lan2.rp_filter=1"),
		"bridge down":             shell("ip link set cnidoc down"),
		"port detached":           shell("ip link set " + veth + " nomaster"),
		"port moved":              shell("ip link add other0 type bridge; ip link set " + veth + " master other0"),
		"Docker": func(l lab) {
			l.programs("dockerd")
			l.command("iptables", "-P", "FORWARD", "DROP")
			l.command("sh", "-c", "iptables -N DOCKER-USER; iptables -I FORWARD -j DOCKER-USER")
		},
		"foreign firewall": func(l lab) {
			l.nft("table inet foreign { chain forward { type filter hook forward priority 0; policy drop; ct state established accept; }; }")
		},
	}
}

// runnable reports whether the test can run a remedy: it changes only links, settings, rules and modes.
func runnable(command string) bool {
	return slices.ContainsFunc([]string{"ip link set ", "sysctl -w ", "chmod ", "iptables -I ", "nft insert ", "podlace reload"},
		func(prefix string) bool { return strings.HasPrefix(command, prefix) })
}

// apply applies the remedy as --fix does, or runs the printed command, with the restore function in the place of podlace reload.
func (l lab) apply(f Finding) {
	l.t.Helper()
	if f.Fix != nil {
		kerneltest.Must(l.t, f.Fix())
		return
	}
	l.command("sh", "-c", strings.ReplaceAll(f.Command, "podlace reload", "true"))
	if strings.Contains(f.Command, "podlace reload") {
		host, err := kernel.Host()
		kerneltest.Must(l.t, err)
		defer host.Close()
		kerneltest.Must(l.t, bridge.Restore(host, slog.New(slog.DiscardHandler), attachment.Waiting))
	}
}

// network returns what no remedy may take from the node: its default routes, addresses, links, and whether it hears routers.
func (l lab) network() []string {
	out, err := exec.Command("sh", "-c", "ip route show default; ip -6 route show default; ip -o addr show scope global | "+
		"grep -o 'lan[^ ]* *inet6* [^ ]*'; ls /sys/class/net").CombinedOutput()
	kerneltest.Must(l.t, err)
	ra, err := os.ReadFile("/proc/sys/net/ipv6/conf/lan1/accept_ra")
	kerneltest.Must(l.t, err)
	forwards, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/forwarding")
	kerneltest.Must(l.t, err)
	lines := strings.Split(string(out), "\n")
	if string(ra) == "2\n" || string(forwards) == "0\n" {
		lines = append(lines, "hears router advertisements")
	}
	return lines
}

// applyAll applies all remedies that doctor prints, one after another, and returns how many. backwards applies the last one first, because
// podlace reload, an early one, does what some of the others do.
func (l lab) applyAll(backwards bool) (applied int) {
	l.t.Helper()
	found, err := Examine(l.Options)
	kerneltest.Must(l.t, err)
	if backwards {
		slices.Reverse(found)
	}
	for _, f := range found {
		if f.Level == OK || f.Level == Skipped || f.Fix == nil && !runnable(f.Command) {
			continue
		}
		before := l.network()
		l.apply(f)
		after := l.network()
		for _, line := range before {
			if !slices.Contains(after, line) {
				l.t.Errorf("%s took from the node: %s", f.Command, line)
			}
		}
		applied++
	}
	return applied
}

// left returns the errors, and the warnings that Fix should have removed.
func (l lab) left() (lines []string) {
	found, err := Examine(l.Options)
	kerneltest.Must(l.t, err)
	for _, f := range found {
		if f.Check != "kernel-features" && (f.Level == Error || f.Level == Warning && f.Fix != nil) {
			lines = append(lines, f.Check+": "+f.What+": "+f.Evidence+": "+f.Command)
		}
	}
	return lines
}

// TestRemediesHarmless: in each state of a node and each pair of two, every remedy that doctor prints leaves the node's own network as it
// is, and after all of them no error is left.
func TestRemediesHarmless(t *testing.T) {
	kerneltest.Slow(t)
	states := faulty()
	names := slices.Sorted(maps.Keys(states))
	for i, one := range names {
		for _, two := range names[i:] {
			if one == "port detached" && two == "port moved" { // the second would undo the first
				continue
			}
			t.Run(one+" and "+two, func(t *testing.T) {
				l := newLab(t)
				l.live("10.91.0.0/29", "fd91::/64")
				l.uplink("lan1", "lan2")
				t.Cleanup(func() { l.command("sh", "-c", "nft flush ruleset; ip link del other0 2>/dev/null; true") })
				l.command("sh", "-c", "ip addr add 192.0.2.9/24 dev lan1; ip -6 addr add 2001:db8::9/64 dev lan1 nodad; "+
					"sysctl -qw net.ipv6.conf.lan2.accept_ra=2 net.ipv6.conf.lan1.accept_ra=2; ip -6 route add default dev lan1 proto ra")
				states[one](l)
				if two != one {
					states[two](l)
				}
				applied := 0
				for round := range 3 { // a remedy may uncover the next fault
					applied += l.applyAll(round == 0)
				}
				if left := l.left(); applied == 0 || len(left) > 0 {
					t.Errorf("after %d remedies %q is left", applied, left)
				}
			})
		}
	}
}
