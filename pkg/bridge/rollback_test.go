// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/ip"
	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// toReference runs the steps of ToReference with the current configuration, and returns their descriptions.
func (l lab) toReference(id, ifname string) (texts []string) {
	l.Helper()
	all, unreadable, err := attachment.Attachments(l.network())
	k := attachment.Key{Network: l.network(), ContainerID: id, IfName: ifname}
	if err != nil || len(unreadable) > 0 || all[k] == nil {
		l.Fatalf("%v, %v, %v", all, unreadable, err)
	}
	rec := all[k]["bridge"]
	of, err := FromRecord(rec)
	if err != nil {
		l.Fatal(err)
	}
	conf, err := json.Marshal(l.Conf)
	if err != nil {
		l.Fatal(err)
	}
	steps, err := ToReference(rec, of.Addresses, conf)
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		c, err := nftables.New()
		if err != nil {
			l.Fatal(err)
		}
		table := c.AddTable(&nftables.Table{Name: "cni_plugins_masquerade", Family: nftables.TableFamilyINet}) // deleting a missing table fails
		c.DelTable(table)
		if err := c.Flush(); err != nil {
			l.Error(err)
		}
	})
	for range 2 { // the steps are idempotent
		for _, s := range steps {
			if s.Do == nil {
				continue
			}
			if err := s.Do(); err != nil {
				l.Fatal(err)
			}
		}
	}
	for _, s := range steps {
		texts = append(texts, s.Text)
	}
	return texts
}

func nftRules(t *testing.T, in string) (lines []string) {
	t.Helper()
	s, err := snapshot.Take(snapshot.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(s.String()) {
		if strings.Contains(line, ": nft rule "+in+" ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// TestCheckOfTheReference (F-44): CHECK accepts an attachment without a record if the reference plugin's rules masquerade it.
func TestCheckOfTheReference(t *testing.T) {
	l := newLab(t, "ipMasqBackend", "nftables")
	a := l.add("a")
	want := "masquerade " + a.result.IPs[0].Address.IP.String() + ", " + a.result.IPs[1].Address.IP.String() + " by rules of nftables"
	if diff := cmp.Diff([]string{want}, l.toReference("a", "eth0")); diff != "" {
		t.Error(diff)
	}
	if err := flushSet("pods"); err != nil {
		t.Fatal(err)
	}
	l.Fails(a.check(), plugin.CodeStateDiffers, "masquerade of")
	a.loseRecord()
	l.OK(a.check())
	if rules := nftRules(t, "inet cni_plugins_masquerade masq_checks"); len(rules) != 2 {
		t.Errorf("rules: %q", rules)
	}
	l.OK(l.Call("DEL", "a", "prevResult", a.prev))
	if rules := nftRules(t, "inet cni_plugins_masquerade masq_checks"); len(rules) != 0 {
		t.Errorf("after DEL: %q", rules)
	}
	l.add("b") // this ADD rewrites the sets
}

// TestToReferenceWithExceptions: configured address families and exceptions also work in rules of the reference plugin's format.
func TestToReferenceWithExceptions(t *testing.T) {
	l := newLab(t, "ipMasqBackend", "nftables", "ipMasq", object{"v6": false, "nonMasqueradeCIDRs": []any{"192.0.2.0/25"}})
	l.add("a")
	l.toReference("a", "eth0")
	rules := nftRules(t, "inet cni_plugins_masquerade masq_checks")
	// the kernel encodes the verdict "return" as -5
	returns := slices.IndexFunc(rules, func(r string) bool { return strings.Contains(r, "c0000200") && strings.Contains(r, "fffffffb") })
	masquerades := slices.IndexFunc(rules, func(r string) bool { return strings.Contains(r, " masq ") })
	if len(rules) != 2 || returns < 0 || masquerades < 0 {
		t.Errorf("rules: %q", rules)
	}
}

// TestToReferenceOfAnotherInterface: the reference plugin's chain name depends on network and container ID, not on the interface.
func TestToReferenceOfAnotherInterface(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t, "ipMasqBackend", "iptables")
	l.OK(l.Call("ADD", "a", "CNI_IFNAME", "net1"))
	t.Cleanup(func() { l.OK(l.Call("DEL", "a", "CNI_IFNAME", "net1")) })
	own, theirs := masqueradeChain(attachment.Key{Network: "net", ContainerID: "a", IfName: "net1"}), masqueradeChain(key("net", "a"))
	l.toReference("a", "net1")
	if rules := nftRules(t, "ip nat "+own); len(rules) > 0 {
		t.Errorf("rules of %s: %q", own, rules)
	}
	if rules := nftRules(t, "ip nat "+theirs); len(rules) != 2 {
		t.Errorf("rules of %s: %q", theirs, rules)
	}
	// Without a record, DEL of net1 removes the container's chain, unless eth0 still uses it.
	forget := l.add("a")
	for _, left := range []int{2, 0} {
		if err := asReference(attachment.Key{Network: "net", ContainerID: "a", IfName: "net1"}).Remove(); err != nil {
			t.Fatal(err)
		}
		if rules := nftRules(t, "ip nat "+theirs); len(rules) != left {
			t.Errorf("rules of %s, want %d: %q", theirs, left, rules)
		}
		if left > 0 {
			forget.loseRecord()
		}
	}
}

// TestIPTablesMasqueradeOfTheReference: the iptables rules, which a rollback keeps, equal those of the reference plugin's own function.
func TestIPTablesMasqueradeOfTheReference(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	addresses := []netip.Prefix{netip.MustParsePrefix("10.9.0.2/24"), netip.MustParsePrefix("fd00::2/64")}
	var nets []*net.IPNet
	for _, a := range addresses {
		nets = append(nets, &net.IPNet{IP: a.Addr().AsSlice(), Mask: kernel.IPNet(a).Mask})
	}
	backend, of := "iptables", key("net", "a")
	chain := masqueradeChain(of)
	written := func(write func() error) (tables []iptables.Table) {
		if err := write(); err != nil {
			t.Fatal(err)
		}
		for _, is4 := range []bool{true, false} {
			nat, err := iptables.List(is4, "POSTROUTING", chain)
			if err != nil {
				t.Fatal(err)
			}
			nat["POSTROUTING"] = nat.Rules("POSTROUTING", chain)
			tables = append(tables, nat)
		}
		if err := iptables.RemoveChain("POSTROUTING", chain); err != nil {
			t.Fatal(err)
		}
		return tables
	}
	want := written(func() error { return ip.SetupIPMasqForNetworks(&backend, nets, of.Network, of.IfName, of.ContainerID) })
	got := written(func() error { return masqueradeByIPTables(of, addresses, nil, true) })
	if diff := cmp.Diff(want, got); diff != "" || len(want[0][chain]) != 2 {
		t.Error(diff)
	}
}
