// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"net"
	"os/exec"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// A ruleset is an nftables table for a test, with a chain, a set and a map, and the netlink connection that changes it.
type ruleset struct {
	*nftables.Conn
	table *nftables.Table
	chain *nftables.Chain
	set   *nftables.Set
	ports *nftables.Set
}

func newRuleset(t *testing.T) *ruleset {
	conn, err := nftables.New()
	must(t, err)
	r := &ruleset{Conn: conn, table: &nftables.Table{Name: "lace", Family: nftables.TableFamilyINet}}
	accept := nftables.ChainPolicyAccept
	r.chain = &nftables.Chain{
		Name: "post", Table: r.table, Type: nftables.ChainTypeNAT, Policy: &accept,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	}
	r.set = &nftables.Set{Name: "pods", Table: r.table, KeyType: nftables.TypeIPAddr}
	r.ports = &nftables.Set{Name: "ports", Table: r.table, IsMap: true, KeyType: nftables.TypeInetService, DataType: nftables.TypeIPAddr}
	return r
}

func (r *ruleset) flush(t *testing.T) { t.Helper(); must(t, r.Flush()) }

func build(t *testing.T) {
	r := newRuleset(t)
	r.AddTable(r.table)
	r.AddChain(r.chain)
	must(t, r.AddSet(r.set, nil))
	must(t, r.AddSet(r.ports, nil))
	r.flush(t)
}

func element(comment string) []nftables.SetElement {
	return []nftables.SetElement{{Key: net.IP{10, 1, 2, 3}, Comment: comment}}
}

func port(to byte) []nftables.SetElement {
	return []nftables.SetElement{{Key: []byte{0x1f, 0x90}, Val: net.IP{10, 1, 2, to}}}
}

// editWith returns a change of the test's table by f.
func editWith(f func(*ruleset) error) func(*testing.T) {
	return func(t *testing.T) {
		r := newRuleset(t)
		must(t, f(r))
		r.flush(t)
	}
}

func rule(comment string, verdict expr.VerdictKind) func(*ruleset) error {
	return func(r *ruleset) error {
		r.AddRule(&nftables.Rule{
			Table: r.table, Chain: r.chain, UserData: []byte(comment),
			Exprs: []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: verdict}},
		})
		return nil
	}
}

func first(f func(*ruleset) error) func(*testing.T) {
	return func(t *testing.T) { build(t); editWith(f)(t) }
}

func TestDetectsNftables(t *testing.T) {
	checkChanges(t, []change{
		{"table", nil, editWith(func(r *ruleset) error { r.AddTable(r.table); return nil }), []string{"nft table inet lace appeared"}},
		{"all", nil, build, []string{"nft chain inet lace post appeared", "nft set inet lace pods appeared", "nft set inet lace ports appeared",
			"nft table inet lace appeared"}},
		{"gone", build, editWith(func(r *ruleset) error { r.DelTable(r.table); return nil }),
			[]string{"nft chain .* vanished", "nft set .* vanished", "nft set .* vanished", "nft table .* vanished"}},
		{"policy", build, editWith(func(r *ruleset) error {
			drop := nftables.ChainPolicyDrop
			r.chain.Policy = &drop
			r.AddChain(r.chain)
			return nil
		}), []string{"nft chain inet lace post changed: policy 1 -> 0"}},
		{"rule", build, editWith(rule("owner A", expr.VerdictAccept)),
			[]string{`nft rule inet lace post counter immediate\{1:00000000 2:\{2:\{1:00000001\}\}\} userdata "owner A" appeared`}},
		{"second equal rule", first(rule("A", expr.VerdictAccept)), editWith(rule("A", expr.VerdictAccept)),
			[]string{`nft rule .* userdata .* \(2\) appeared`}},
		{"comment of a rule", first(rule("owner A", expr.VerdictAccept)), func(t *testing.T) {
			editWith(func(r *ruleset) error { r.FlushChain(r.chain); return rule("owner B", expr.VerdictAccept)(r) })(t)
		}, []string{`nft rule .* "owner A" vanished`, `nft rule .* "owner B" appeared`}},
		{"order of rules", func(t *testing.T) {
			first(rule("A11", expr.VerdictAccept))(t)
			editWith(rule("B11", expr.VerdictDrop))(t)
		},
			func(t *testing.T) {
				editWith(func(r *ruleset) error {
					r.FlushChain(r.chain)
					_ = rule("B11", expr.VerdictDrop)(r)
					return rule("A11", expr.VerdictAccept)(r)
				})(t)
			}, []string{"order of nft rule inet lace post changed: hash .* -> .*"}},
		{"element", build, editWith(func(r *ruleset) error { return r.SetAddElements(r.set, element("")) }),
			[]string{`nft element inet lace pods \{1:0a010203\} appeared`}},
		{"comment of an element", first(func(r *ruleset) error { return r.SetAddElements(r.set, element("pod A")) }), func(t *testing.T) {
			editWith(func(r *ruleset) error { return r.SetDeleteElements(r.set, element("")) })(t)
			editWith(func(r *ruleset) error { return r.SetAddElements(r.set, element("pod B")) })(t)
		}, []string{`nft element inet lace pods \{1:0a010203\} changed: userdata 0:"pod A" -> 0:"pod B"`}},
		{"value in a map", first(func(r *ruleset) error { return r.SetAddElements(r.ports, port(3)) }), func(t *testing.T) {
			editWith(func(r *ruleset) error { return r.SetDeleteElements(r.ports, port(3)) })(t)
			editWith(func(r *ruleset) error { return r.SetAddElements(r.ports, port(4)) })(t)
		}, []string{`nft element inet lace ports \{1:1f90\} changed: data \{1:0a010203\} -> \{1:0a010204\}`}},
		{"flags of a set", build, func(t *testing.T) {
			editWith(func(r *ruleset) error { r.DelSet(r.set); return nil })(t)
			editWith(func(r *ruleset) error { r.set.Interval = true; return r.AddSet(r.set, nil) })(t)
		}, []string{"nft set inet lace pods changed: .*flags .*"}},
		{"interval", func(t *testing.T) {
			editWith(func(r *ruleset) error { r.AddTable(r.table); r.set.Interval = true; return r.AddSet(r.set, nil) })(t)
		}, editWith(func(r *ruleset) error {
			return r.SetAddElements(r.set, []nftables.SetElement{{Key: net.IP{10, 1, 0, 0}}, {Key: net.IP{10, 2, 0, 0}, IntervalEnd: true}})
		}), []string{`nft element inet lace pods \{1:0a010000\} appeared`, `nft element inet lace pods \{1:0a020000\} flags 1 appeared`}},
		{"counting element", func(t *testing.T) {
			editWith(func(r *ruleset) error { r.AddTable(r.table); r.set.Counter = true; return r.AddSet(r.set, nil) })(t)
		}, editWith(func(r *ruleset) error { return r.SetAddElements(r.set, element("")) }),
			[]string{`nft element inet lace pods \{1:0a010203\} appeared`}},
		{"object", build, editWith(func(r *ruleset) error {
			r.AddObj(&nftables.CounterObj{Table: r.table, Name: "seen"})
			return nil
		}), []string{"nft object inet lace seen type 1 appeared"}},
	})
}

// runCommand returns a function that runs a command in the current namespace, or skips the test if it is not installed.
func runCommand(name string, args ...string) func(*testing.T) {
	return func(t *testing.T) {
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
	}
}

func TestDetectsIptables(t *testing.T) {
	for _, tool := range []struct{ name, table, want string }{
		{"iptables-nft", "filter", `nft rule ip filter FORWARD .*`},
		{"ip6tables-nft", "nat", `nft rule ip6 nat POSTROUTING .*`},
		{"iptables-legacy", "filter", `iptables-legacy filter -A FORWARD -s 10.0.0.0/8 -m comment --comment "owner A" -j ACCEPT`},
		{"ip6tables-legacy", "nat", `ip6tables-legacy nat -A POSTROUTING -s fd00::/8 -m comment --comment "owner A" -j ACCEPT`},
	} {
		t.Run(tool.name, func(t *testing.T) {
			needs(t, tool.name, tool.table)
			chain, source := "FORWARD", "10.0.0.0/8"
			if tool.table == "nat" {
				chain, source = "POSTROUTING", "fd00::/8"
			}
			args := func(verb, comment string) []string {
				return []string{"-w", "-t", tool.table, verb, chain, "-s", source, "-m", "comment", "--comment", comment, "-j", "ACCEPT"}
			}
			load := func(t *testing.T) {
				runCommand(tool.name, "-w", "-t", tool.table, "-A", chain)(t)
				runCommand(tool.name, "-w", "-t", tool.table, "-F")(t)
			}
			add := runCommand(tool.name, args("-A", "owner A")...)
			checkChanges(t, []change{
				{"rule", load, add, []string{tool.want + " appeared"}},
				{"gone", func(t *testing.T) { load(t); add(t) }, runCommand(tool.name, args("-D", "owner A")...), []string{tool.want + " vanished"}},
			})
		})
	}
}

// needs skips the test if the tool is not installed or the kernel does not support the iptables table.
func needs(t *testing.T, tool, table string) {
	t.Helper()
	path, err := exec.LookPath(tool)
	if err != nil {
		t.Skip(err)
	}
	err = kerneltest.NewPod(t).Do(func() error { return exec.Command(path, "-t", table, "-S").Run() })
	if err != nil {
		t.Skipf("%s -t %s: %v", tool, table, err)
	}
}

func TestDetectsConntrack(t *testing.T) {
	pod := kerneltest.NewPod(t)
	for _, on := range []bool{false, true} {
		opt := snapshot.Options{Pods: []*sandbox.Pod{pod}, Conntrack: on}
		before, err := snapshot.Take(opt)
		must(t, err)
		must(t, pod.Do(func() error {
			return netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow(on))
		}))
		after, err := snapshot.Take(opt)
		must(t, err)
		diff := snapshot.Diff(before, after)
		if !on {
			if len(diff) > 0 {
				t.Errorf("not asked for connections, yet: %q", diff)
			}
			continue
		}
		compare(t, "pod "+pod.Name, diff, []string{"conntrack protocol 17 10.0.0.1:1000 to 10.0.0.2:53 reply protocol 17 10.0.0.2:53 to 10.0.0.1:1000 .*appeared"})
	}
}

func flow(second bool) *netlink.ConntrackFlow {
	f := &netlink.ConntrackFlow{
		FamilyType: unix.AF_INET, TimeOut: 60,
		Forward: netlink.IPTuple{SrcIP: net.IP{10, 0, 0, 1}, DstIP: net.IP{10, 0, 0, 2}, SrcPort: 1000, DstPort: 53, Protocol: 17},
		Reverse: netlink.IPTuple{SrcIP: net.IP{10, 0, 0, 2}, DstIP: net.IP{10, 0, 0, 1}, SrcPort: 53, DstPort: 1000, Protocol: 17},
	}
	if !second {
		f.Forward.SrcPort, f.Reverse.DstPort = 999, 999
	}
	return f
}
