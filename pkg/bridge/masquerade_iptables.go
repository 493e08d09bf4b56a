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

func masqueradeByIPTables(key attachment.Key, addresses, except []netip.Prefix) error {
	for _, is4 := range []bool{true, false} {
		lines := masqueradeLines(key, is4, addresses, except)
		if len(lines) == 0 {
			continue
		}
		if err := replaceMasquerade(key, is4, lines); err != nil {
			return withHint(err)
		}
	}
	return nil
}

func replaceMasquerade(key attachment.Key, is4 bool, lines []string) error {
	table, err := iptables.Open(is4, true)
	if err != nil {
		return err
	}
	defer table.Close()
	return table.Apply(append(table.NAT().Deletions("POSTROUTING", masqueradeChain(key)), lines...))
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
	chain := masqueradeChain(key)
	comment := `-m comment --comment ` + iptables.Comment(fmt.Sprintf("name: %q id: %q", key.Network, key.ContainerID))
	lines := []string{":" + chain + " - [0:0]"}
	var jumps []string
	for _, a := range ofFamily(addresses, is4) {
		lines = append(lines, fmt.Sprintf("-A %s -d %s %s -j ACCEPT", chain, a.Masked(), comment))
		jumps = append(jumps, fmt.Sprintf("-A POSTROUTING -s %s %s -j %s", a.Addr(), comment, chain))
	}
	if len(jumps) == 0 {
		return nil
	}
	for _, p := range ofFamily(except, is4) {
		lines = append(lines, fmt.Sprintf("-A %s -d %s %s -j ACCEPT", chain, p, comment))
	}
	everywhere := map[bool]string{true: "224.0.0.0/4", false: "ff00::/8"}[is4]
	lines = append(lines, fmt.Sprintf("-A %s ! -d %s %s -j MASQUERADE", chain, everywhere, comment))
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
	for _, a := range addresses {
		if len(nat.Rules("POSTROUTING", "-s "+a.Addr().String()+"/", "-j "+chain+" ")) == 0 || len(nat.Rules(chain, "MASQUERADE")) == 0 {
			return plugin.Differs("iptables masquerade of %s is missing", a.Addr())
		}
		if len(nat.Rules(chain, "-d "+a.Masked().String()+" ", "-j ACCEPT")) == 0 {
			return plugin.Differs("the exception from iptables masquerade for %s is missing", a.Masked())
		}
	}
	for _, p := range ofFamily(j.cfg.Masquerade.Except, is4) {
		if len(nat.Rules(chain, "-d "+p.String()+" ", "-j ACCEPT")) == 0 {
			return plugin.Differs("the exception from iptables masquerade for %s is missing", p)
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
	byKey := map[attachment.Key][]string{}
	for _, pod := range finished(pods) {
		if lines := masqueradeLines(pod.Key, is4, pod.State.byIPTables(), pod.State.Except); len(lines) > 0 {
			byKey[pod.Key] = lines
		}
	}
	if len(byKey) == 0 {
		return nil
	}
	table, err := iptables.Open(is4, wait)
	if err != nil {
		return err
	}
	defer table.Close()
	nat, lines := table.NAT(), []string(nil)
	for key, own := range byKey {
		if chain := masqueradeChain(key); len(nat.Rules("POSTROUTING", "-j "+chain+" ")) == 0 || len(nat.Rules(chain)) == 0 {
			lines = append(append(lines, nat.Deletions("POSTROUTING", chain)...), own...)
		}
	}
	if len(lines) > 0 {
		log.Info("masquerade is missing and is restored from the records", "program", "iptables", "lines", len(lines))
	}
	return table.Apply(lines)
}
