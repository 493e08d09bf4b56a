// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
)

// plainLab returns a lab for a pod of another network on the same node, which needs no nftables or iptables rules.
func (l lab) plainLab(name, bridge string) lab {
	l.Helper()
	next := l.other()
	next.Conf = object{"cniVersion": "1.1.0", "name": name, "type": "bridge", "bridge": bridge, "ipam": hostLocal("10.92.0.0/24")}
	return next
}

// TestPlainVerbsRestore (F-21): after a flush, ADD and STATUS restore the rules of all networks, even if their own network needs none.
func TestPlainVerbsRestore(t *testing.T) {
	kerneltest.Slow(t)
	flush := func(tables ...string) []string {
		for i, table := range tables {
			tables[i] = "nft flush table " + table
		}
		return append(tables, "nft flush ruleset")
	}
	both := []string{"ADD", "STATUS"}
	for what, c := range map[string]struct {
		keys    []any
		verbs   []string
		flushes []string
	}{
		"guards":     {[]any{"antiSpoof", true, "ipMasq", false}, both, flush("bridge podlace_guard")},
		"MACs":       {[]any{"macspoofchk", true, "ipMasq", false}, both, flush()},
		"both":       {[]any{"antiSpoof", true}, both, flush("inet podlace_masquerade", "bridge podlace_guard")},
		"masquerade": {nil, both, flush("inet podlace_masquerade")},
		"VLAN":       {[]any{"vlan", 5, "ipMasq", false}, both, flush("inet podlace_vlan")},
		"iptables":   {[]any{"ipMasqBackend", "iptables"}, []string{"STATUS"}, flush()},
	} {
		t.Run(what, func(t *testing.T) {
			bridge := "btpl" + what[:2]
			l := bareLab(t, append([]any{"name", "wants" + what, "bridge", bridge, "ipam", hostLocal("10.91.0.0/24")}, c.keys...)...)
			switch o := l.Call("STATUS", ""); {
			case what == "VLAN" && o.Exit != 0:
				t.Skip("SKIPPED: the kernel has no VLAN filtering")
			case what == "iptables" && !iptables.Installed(true):
				t.Skip("SKIPPED: iptables is not installed")
			}
			t.Cleanup(func() { _ = onHost(bridge, netlink.LinkDel) })
			a := l.add("a")
			for _, verb := range c.verbs {
				for _, flush := range c.flushes {
					l.run(flush)
					l.Fails(a.check(), plugin.CodeStateDiffers, "miss")
					next := l.plainLab("plain"+what, bridge)
					if verb == "STATUS" {
						l.OK(next.Call("STATUS", ""))
					} else {
						next.OK(next.Call("ADD", "plain"))
						next.OK(next.Call("DEL", "plain"))
					}
					if o := a.check(); o.Exit != 0 {
						t.Errorf("%s, then %s of a plain network: CHECK: %s", flush, verb, o.Stdout)
					}
				}
			}
		})
	}
}

// TestPlainNode: on a node whose pods need no rules, ADD creates no table or note file, and removes the note files of flushed tables.
func TestPlainNode(t *testing.T) {
	l := bareLab(t, "name", "needy", "bridge", "btpn", "antiSpoof", true)
	t.Cleanup(func() { _ = onHost("btpn", netlink.LinkDel) })
	l.add("a")
	l.OK(l.Call("DEL", "a"))
	for range 2 {
		l.run("nft flush ruleset")
		next := l.plainLab("undemanding", "btpn")
		next.OK(next.Call("ADD", "plain"))
		next.OK(next.Call("DEL", "plain"))
		if got := l.run("nft list tables"); got != "" {
			t.Errorf("tables: %s", got)
		}
		if places := baseChains(); len(places) > 0 {
			t.Errorf("the next ADD asks for %v", places)
		}
	}
}

// TestPortJoinedAgain: GC restores the flags of a guarded port, which the kernel resets when a port leaves the bridge.
func TestPortJoinedAgain(t *testing.T) {
	l := bareLab(t, "name", "rejoined", "bridge", "btre", "antiSpoof", true)
	t.Cleanup(func() { _ = onHost("btre", netlink.LinkDel) })
	a := l.add("a")
	l.run("ip link set dev " + a.hostVeth() + " nomaster; ip link set dev " + a.hostVeth() + " master btre")
	l.Fails(a.check(), plugin.CodeStateDiffers, "")
	l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
	l.OK(a.check())
}

// TestReservedRestored: STATUS and GC set group_fwd_mask of a port again that another program reset.
func TestReservedRestored(t *testing.T) {
	l := bareLab(t, "name", "older", "bridge", "btold", "antiSpoof", true)
	t.Cleanup(func() { _ = onHost("btold", netlink.LinkDel) })
	a := l.add("a")
	for _, verb := range []string{"STATUS", "GC"} {
		l.run("ip link set dev " + a.hostVeth() + " type bridge_slave group_fwd_mask 0")
		l.Fails(a.check(), plugin.CodeStateDiffers, "group_fwd_mask is missing")
		version := int(guardSchema().Version)
		l.run(fmt.Sprintf("nft delete element bridge podlace_guard schema '{ %d }'; nft add element bridge podlace_guard schema '{ %d }'",
			version, version-1))
		l.OK(l.Call(verb, "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
		l.OK(a.check())
	}
}
