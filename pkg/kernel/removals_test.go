// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestRemovals: a removal of each kind of object is announced. An addition, the end of a pod, and a change of foreign chains are not.
func TestRemovals(t *testing.T) {
	concern := func(table, chain string) bool { return table == "ktours" && !strings.HasPrefix(chain, "KUBE-") }
	removals, err := Removals(t.Context(), concern, func(program string) bool { return program == "ktown" })
	kerneltest.Must(t, err)
	heard := func(within time.Duration) (all []string) {
		for {
			select {
			case r := <-removals:
				all = append(all, strings.TrimSpace(r.What+" "+r.By))
			case <-time.After(within):
				return all
			}
		}
	}
	own := t.TempDir()
	kerneltest.Must(t, exec.Command("sh", "-c", "cp $(command -v nft) "+own+"/ktown").Run())
	t.Setenv("OWN", own)
	for _, c := range []struct{ command, want string }{
		{"ip link add ktbr up type bridge", ""},
		{"ip link add ktv type veth peer name ktp; ip link set ktv master ktbr; ip link set ktv up", ""},
		{"ip link set ktv nomaster", "link ktv"},
		{"ip link set ktv down; ip link del ktv", ""},
		{"ip addr add 10.99.0.1/24 dev ktbr; ip -6 addr add fd99::1/64 dev ktbr nodad; ip route add 10.98.0.0/24 dev ktbr; ip route del 10.98.0.0/24", ""},
		{"ip route del 10.99.0.0/24 dev ktbr", "a route"},
		{"ip -6 addr del fd99::1/64 dev ktbr", "an address"},
		{"tc qdisc add dev ktbr root tbf rate 1mbit burst 10k latency 10ms", ""},
		{"tc qdisc del dev ktbr root", "a qdisc"},
		{"tc qdisc add dev ktbr clsact; tc filter add dev ktbr ingress protocol all u32 match u32 0 0 flowid 1:1", ""},
		{"tc filter del dev ktbr ingress", "a filter"},
		{"sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1", ""},
		{"sysctl -qw net.ipv4.conf.ktbr.forwarding=0", ""},
		{"sysctl -qw net.ipv4.ip_forward=0", "forwarding"},
		{"sysctl -qw net.ipv6.conf.all.forwarding=0", "forwarding"},
		{"ip link add ktifb type ifb; ip link set ktifb up; ip link del ktifb", "link ktifb"},
		{"ip link set ktbr down", "link ktbr"},
		{"ip link del ktbr", "link ktbr"},
		{"nft add table inet ktours; nft add chain inet ktours KUBE-A; nft add rule inet ktours KUBE-A accept; nft flush chain inet ktours KUBE-A", ""},
		{"nft add chain inet ktours b; nft add rule inet ktours b accept; nft flush chain inet ktours b", "rules in table ktours nft"},
		{"nft 'add set inet ktours s { type ipv4_addr; }; add element inet ktours s { 10.0.0.1 }'", ""},
		{"nft delete element inet ktours s '{ 10.0.0.1 }'", "rules in table ktours nft"},
		{"nft add element inet ktours s '{ 10.0.0.1 }'; $OWN/ktown delete element inet ktours s '{ 10.0.0.1 }'", ""},
		{"nft add element inet ktours s '{ 10.0.0.1 }'; $OWN/ktown delete element inet ktours s '{ 10.0.0.1 }'; nft flush ruleset",
			"rules in table ktours nft"},
		{"nft add table inet ktother; nft delete table inet ktother", ""},
	} {
		if out, err := exec.Command("sh", "-ec", c.command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", c.command, err, out)
		}
		got := heard(300 * time.Millisecond)
		if c.want == "" && len(got) > 0 || c.want != "" && !strings.Contains(strings.Join(got, "\n")+"\n", c.want+"\n") {
			t.Errorf("%s: %q, want %q", c.command, got, c.want)
		}
	}
}
