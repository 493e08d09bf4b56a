// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/reference"
)

// masqueradeChain returns the name of the reference plugin's chain. The rules have that plugin's format, so it can remove both after a
// rollback.
func masqueradeChain(key attachment.Key) string { return reference.Bridge(reference.Of(key)).Chain() }

// masqueradeByIPTables writes the pod's chain in the nat table, and the chain of the same name in the mangle table that drops packets
// which belong to no connection, and so would leave with the pod's address. asReference leaves out that chain, which the reference plugin
// cannot remove.
func masqueradeByIPTables(key attachment.Key, addresses, except []netip.Prefix, asReference bool) error {
	for _, is4 := range []bool{true, false} {
		nat, mangle := masqueradeLines(key, is4, addresses, except), invalidLines(key, is4, addresses, except)
		if len(nat) == 0 {
			continue
		}
		if asReference {
			mangle = nil
		}
		if err := replaceMasquerade(key, is4, nat, mangle); err != nil {
			return withHint(err)
		}
	}
	return nil
}

func replaceMasquerade(key attachment.Key, is4 bool, nat, mangle []string) error {
	table, err := iptables.Open(is4, true)
	if err != nil {
		return err
	}
	defer table.Close()
	nat = append(table.NAT().Deletions("POSTROUTING", masqueradeChain(key)), nat...)
	if len(mangle) > 0 {
		has, err := table.Mangle()
		if err != nil {
			return err
		}
		mangle = append(has.Deletions("POSTROUTING", masqueradeChain(key)), mangle...)
	}
	return table.Apply(nat, mangle...)
}

// withHint adds a hint to an error that means that iptables is not installed.
func withHint(err error) error {
	var program *iptables.MissingProgram
	if errors.As(err, &program) {
		return plugin.WithHint(err, "install iptables, or use the nftables backend, which needs no program")
	}
	return err
}

func masqueradeLines(key attachment.Key, is4 bool, addresses, except []netip.Prefix) []string {
	return leavingLines(key, is4, addresses, except, "", "ACCEPT", "MASQUERADE")
}

func invalidLines(key attachment.Key, is4 bool, addresses, except []netip.Prefix) []string {
	return leavingLines(key, is4, addresses, except, "-m conntrack --ctstate INVALID ", "RETURN", "DROP")
}

// leavingLines returns the lines of a chain that sends the pod's packets that match, if they leave the network, to the target leaves, and
// others to the target stays.
func leavingLines(key attachment.Key, is4 bool, addresses, except []netip.Prefix, match, stays, leaves string) []string {
	chain := masqueradeChain(key)
	comment := `-m comment --comment ` + iptables.Comment(fmt.Sprintf("name: %q id: %q", key.Network, key.ContainerID))
	lines := []string{":" + chain + " - [0:0]"}
	var jumps []string
	for _, a := range ofFamily(addresses, is4) {
		lines = append(lines, fmt.Sprintf("-A %s -d %s %s -j %s", chain, a.Masked(), comment, stays))
		jumps = append(jumps, fmt.Sprintf("-A POSTROUTING -s %s %s%s -j %s", a.Addr(), match, comment, chain))
	}
	if len(jumps) == 0 {
		return nil
	}
	for _, p := range ofFamily(except, is4) {
		lines = append(lines, fmt.Sprintf("-A %s -d %s %s -j %s", chain, p, comment, stays))
	}
	everywhere := map[bool]string{true: "224.0.0.0/4", false: "ff00::/8"}[is4]
	lines = append(lines, fmt.Sprintf("-A %s ! -d %s %s -j %s", chain, everywhere, comment, leaves))
	return append(lines, jumps...)
}

func ofFamily(prefixes []netip.Prefix, is4 bool) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(prefixes), func(p netip.Prefix) bool { return p.Addr().Is4() != is4 })
}

func (j *job) checkIPTables(is4 bool, addresses []netip.Prefix) error {
	if addresses = ofFamily(addresses, is4); len(addresses) == 0 {
		return nil
	}
	chain := masqueradeChain(j.att.Key)
	nat, err := iptables.List(is4, "POSTROUTING", chain)
	if err != nil {
		return withHint(err)
	}
	if err := j.compareLeaving(nat, chain, addresses, "iptables masquerade", "ACCEPT", "MASQUERADE"); err != nil || !j.hasRecord {
		return err // without a record, the rules may be the reference plugin's
	}
	mangle, err := iptables.ListMangle(is4, "POSTROUTING", chain)
	if err != nil {
		return withHint(err)
	}
	err = j.compareLeaving(mangle, chain, addresses, "iptables masquerade, table mangle,", "RETURN", "DROP")
	if plugin.IsDifferent(err) && !mangle.HasChain(chain) {
		j.tolerateInvalid(err)
		return nil
	}
	return err
}

// compareLeaving compares rules with those of leavingLines.
func (j *job) compareLeaving(rules iptables.Table, chain string, addresses []netip.Prefix, what, stays, leaves string) error {
	except := ofFamily(j.cfg.Masquerade.Except, addresses[0].Addr().Is4())
	for _, a := range addresses {
		if len(rules.Rules("POSTROUTING", "-s "+a.Addr().String()+"/", "-j "+chain+" ")) == 0 || len(rules.Rules(chain, "-j "+leaves+" ")) == 0 {
			return plugin.Differs("%s of %s is missing", what, a.Addr())
		}
		except = append(except, a.Masked())
	}
	for _, p := range except {
		if len(rules.Rules(chain, "-d "+p.String()+" ", "-j "+stays+" ")) == 0 {
			return plugin.Differs("the exception from %s for %s is missing", what, p)
		}
	}
	return nil
}

// byIPTables returns the recorded addresses that iptables masquerades.
func (st state) byIPTables() []netip.Prefix {
	if st.Masquerade != "iptables" {
		return nil
	}
	return Masquerade{V4: !st.NoMasq4, V6: !st.NoMasq6}.ofMasqueradedFamilies(st.Addresses)
}

// restoreIPTables writes missing iptables rules of masqueraded pods. Without wait, a held iptables lock is a busy error.
func restoreIPTables(log *slog.Logger, pods []attachment.Of[state], is4, wait bool) error {
	pods = slices.DeleteFunc(finished(pods), func(pod attachment.Of[state]) bool { return len(ofFamily(pod.State.byIPTables(), is4)) == 0 })
	if len(pods) == 0 {
		return nil
	}
	table, err := iptables.Open(is4, wait)
	if err != nil {
		return err
	}
	defer table.Close()
	mangle, err := table.Mangle()
	if err != nil {
		return err
	}
	nat := missingLines(table.NAT(), pods, is4, masqueradeLines)
	invalid := missingLines(mangle, pods, is4, invalidLines)
	if lines := len(nat) + len(invalid); lines > 0 {
		log.Info("masquerade is missing and is restored from the records", "program", "iptables", "lines", lines)
	}
	return table.Apply(nat, invalid...)
}

// missingLines returns the lines that write the chains of those pods that lack theirs.
func missingLines(has iptables.Table, pods []attachment.Of[state], is4 bool,
	write func(attachment.Key, bool, []netip.Prefix, []netip.Prefix) []string) (lines []string) {
	for _, pod := range pods {
		if chain := masqueradeChain(pod.Key); len(has.Rules("POSTROUTING", "-j "+chain+" ")) == 0 || len(has.Rules(chain)) == 0 {
			lines = append(append(lines, has.Deletions("POSTROUTING", chain)...), write(pod.Key, is4, pod.State.byIPTables(), pod.State.Except)...)
		}
	}
	return lines
}
