// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
	"github.com/podlace/podlace/pkg/reference"
)

// Chains and rules are named and written as by the reference plugin, which can therefore remove them after a rollback.
const (
	dnatChain = reference.HostportChain
	markChain = "CNI-HOSTPORT-SETMARK"
	masqChain = "CNI-HOSTPORT-MASQ"

	// maxMultiport is the maximum number of ports in one multiport match (iptables-extensions(8)).
	maxMultiport = 15
)

func podChain(key attachment.Key) string { return reference.Portmap(reference.Of(key)).Chain() }

// addByIPTables starts two processes for each address family with ports. If shared rules are missing, it also restores the rules of all
// other pods.
func addByIPTables(key attachment.Key, st portState, log *slog.Logger) error {
	var lost []recordedPorts
	for _, p := range st.Rules.Pod {
		others, err := st.addFamily(key, p, log)
		if err != nil {
			return withHint(st.Rules.withConditions(err, p.Addr().Is4()))
		}
		if len(others) > 0 {
			lost = others
		}
	}
	if len(lost) == 0 {
		return nil
	}
	if _, err := restoreIPTables(lost, true, log); err != nil { // also in a family that this pod does not use
		log.Warn(notRestored, "error", err)
	}
	return nil
}

// addFamily forwards the ports of one address of the pod. If shared rules were missing, it returns all recorded attachments, whose rules
// the caller then restores.
func (st portState) addFamily(key attachment.Key, pod netip.Prefix, log *slog.Logger) (lost []recordedPorts, err error) {
	table, err := iptables.Open(pod.Addr().Is4(), true)
	if err != nil {
		return nil, err
	}
	defer table.Close()
	own, err := st.familyLines(table.NAT(), key, pod)
	if err != nil {
		return nil, err
	}
	if len(own) == 0 || jumpsToHostports(table.NAT()) {
		return nil, table.Apply(own)
	}
	if lost, err = allRecorded(); err != nil {
		log.Warn(notRestored, "error", err)
	}
	others, skipped := missingLines(table.NAT(), lost, pod.Addr().Is4())
	if skipped != nil {
		log.Warn(notRestored, "error", skipped)
	}
	err = table.Apply(uniqueLines(append(slices.Clone(own), others...)))
	if err != nil && len(lost) > 0 && plugin.Code(err) != plugin.CodeTryAgain {
		err = table.Apply(own) // another pod's rule may have been refused
	}
	return lost, err
}

// withConditions adds the pod's conditions to an error of iptables, because the other parts of a rule have the same form for every pod.
func (of iptablesRules) withConditions(err error, is4 bool) error {
	key, words := of.conditionsOf(is4)
	if len(words) == 0 || !iptables.Refused(err) {
		return err
	}
	return plugin.Errorf(plugin.CodeConfig, "%s %+.80q: %w", key, words, err)
}

// conditionsOf returns the conditions of an address family and the configuration key that contains them.
func (of iptablesRules) conditionsOf(is4 bool) (key string, words []string) {
	if is4 {
		return "conditionsV4", of.ConditionsV4
	}
	return "conditionsV6", of.ConditionsV6
}

// familyLines returns the iptables-restore lines that forward the ports of one address of the pod.
func (st portState) familyLines(nat iptables.Table, key attachment.Key, pod netip.Prefix) ([]string, error) {
	own := ports.OfFamily(st.Ports, pod.Addr().Is4())
	if len(own) == 0 {
		return nil, nil
	}
	if chain := st.Rules.MarkChain; chain != "" && own[0].SNAT && !nat.HasChain(chain) {
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "externalSetMarkChain %s: no such chain in the nat table", chain),
			"kube-proxy in nftables mode does not make it; leave the key out to use a chain of our own")
	}
	lines := append(sharedLines(nat, own[0].SNAT, *st.Rules), podLines(key, *st.Rules, own, pod)...)
	return append(lines, jumpLines(nat, key, *st.Rules, own)...), nil
}

// jumpsToHostports reports whether the base chains jump to the chain of all hostPorts.
func jumpsToHostports(nat iptables.Table) bool {
	return nat.HasChain(dnatChain) && len(nat.Rules("PREROUTING", "-j "+dnatChain+" ")) > 0 &&
		len(nat.Rules("OUTPUT", "-j "+dnatChain+" ")) > 0
}

// byIPTables reports whether iptables forwards the attachment's ports of the address family.
func (rec recordedPorts) byIPTables(is4 bool) bool {
	return rec.Backend == "iptables" && rec.Rules != nil && len(ports.OfFamily(rec.Ports, is4)) > 0
}

// restoreIPTables restores missing rules of attachments, and reports whether any was missing. Unless wait is set, it returns a busy error
// while another process holds the iptables lock.
func restoreIPTables(all []recordedPorts, wait bool, log *slog.Logger) (changed bool, err error) {
	var errs []error
	for _, is4 := range []bool{true, false} {
		if !slices.ContainsFunc(all, func(rec recordedPorts) bool { return rec.byIPTables(is4) }) {
			continue
		}
		restored, skipped, err := restoreFamily(is4, all, wait, log)
		changed = changed || restored
		if err == nil {
			errs = append(errs, skipped)
			continue
		}
		if plugin.Code(err) == plugin.CodeTryAgain {
			return changed, errors.Join(append(errs, err)...) // each attempt would wait equally long for the same lock
		}
		for i := range all { // one refused rule would block all others
			restored, skipped, err := restoreFamily(is4, all[i:i+1], wait, log)
			changed = changed || restored
			errs = append(errs, err, skipped)
		}
	}
	return changed, errors.Join(errs...)
}

// restoreFamily restores the missing rules of one address family with one command. skipped has an error for each attachment whose rules
// cannot be written.
func restoreFamily(is4 bool, all []recordedPorts, wait bool, log *slog.Logger) (changed bool, skipped, err error) {
	table, err := iptables.Open(is4, wait)
	if err != nil {
		return false, nil, err
	}
	defer table.Close()
	lines, skipped := missingLines(table.NAT(), all, is4)
	if len(lines) > 0 {
		log.Info("rules of hostPorts are missing and are restored from the records", "program", "iptables", "lines", len(lines))
	}
	return len(lines) > 0, skipped, table.Apply(lines)
}

// missingLines returns the iptables-restore lines of missing rules, and an error for each attachment whose lines cannot be written.
func missingLines(nat iptables.Table, all []recordedPorts, is4 bool) (lines []string, err error) {
	for _, rec := range all {
		if !rec.byIPTables(is4) {
			continue
		}
		pod := slices.IndexFunc(rec.Rules.Pod, func(p netip.Prefix) bool { return p.Addr().Is4() == is4 })
		if pod < 0 || jumpsToHostports(nat) && checkRules(nat, podChain(rec.Key), ports.OfFamily(rec.Ports, is4)) == nil {
			continue
		}
		own, e := rec.familyLines(nat, rec.Key, rec.Rules.Pod[pod])
		if e != nil {
			err = errors.Join(err, fmt.Errorf("hostPorts of %s: %w", ownerName(rec.owner()), e))
		}
		lines = append(lines, own...)
	}
	return uniqueLines(lines), err
}

// uniqueLines removes lines that are equal to an earlier one.
func uniqueLines(lines []string) (out []string) {
	seen := map[string]bool{}
	for _, line := range lines {
		if !seen[line] {
			seen[line] = true
			out = append(out, line)
		}
	}
	return out
}

// sharedLines returns the lines of the missing rules that all pods share.
func sharedLines(nat iptables.Table, snat bool, of iptablesRules) []string {
	var chains, rules []string
	need := func(chain, rule string, parts ...string) {
		if len(nat.Rules(chain, parts...)) == 0 {
			rules = append(rules, rule)
		}
	}
	make := func(chain string) {
		if !nat.HasChain(chain) {
			chains = append(chains, ":"+chain+" - [0:0]")
		}
	}
	make(dnatChain)
	for _, hook := range []string{"PREROUTING", "OUTPUT"} {
		need(hook, "-A "+hook+" -m addrtype --dst-type LOCAL -j "+dnatChain, "-j "+dnatChain+" ")
	}
	if snat && of.MarkChain == "" {
		mark := fmt.Sprintf("0x%x/0x%x", 1<<of.MarkBit, 1<<of.MarkBit)
		make(markChain)
		make(masqChain)
		need(markChain, fmt.Sprintf(`-A %s -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark %s`, markChain, mark), mark)
		need(masqChain, fmt.Sprintf("-A %s -m mark --mark %s -j MASQUERADE", masqChain, mark), mark)
		// Rules may still have the mark bit of an earlier configuration, which another program may use by now. The chains with it are shared, so
		// all pods change to the new bit at once.
		for _, rule := range append(nat.Rules(markChain, "-j MARK "), nat.Rules(masqChain, "-j MASQUERADE ")...) {
			if !strings.Contains(rule, mark) {
				rules = append(rules, "-D"+strings.TrimPrefix(rule, "-A"))
			}
		}
		need("POSTROUTING", `-I POSTROUTING 1 -m comment --comment "CNI portfwd requiring masquerade" -j `+masqChain, "-j "+masqChain+" ")
	}
	return append(chains, rules...)
}

// podLines returns the iptables-restore lines of the pod's own chain. For each port, packets are marked for masquerade before their address
// is translated.
func podLines(key attachment.Key, of iptablesRules, list []ports.Port, pod netip.Prefix) []string {
	chain := podChain(key)
	lines := []string{":" + chain + " - [0:0]"}
	mark := markChain
	if of.MarkChain != "" {
		mark = of.MarkChain
	}
	if pod.Addr().Is6() {
		// Packets from ::1 never leave the node. Untranslated, a connection to [::1] is refused at once.
		lines = append(lines, "-A "+chain+" -d ::1/128 -j RETURN")
	}
	for _, p := range hostIPFirst(list) {
		match := "-p " + p.Protocol
		if p.HostIP.IsValid() {
			match = "-d " + p.HostIP.String() + " " + match
		}
		match += fmt.Sprintf(" -m %s --dport %d", p.Protocol, p.Port)
		for _, source := range markedSources(p, pod) {
			lines = append(lines, fmt.Sprintf("-A %s %s%s -j %s", chain, source, match, mark))
		}
		lines = append(lines, fmt.Sprintf("-A %s %s -j DNAT --to-destination %s", chain, match, p.To))
	}
	return lines
}

func markedSources(p ports.Port, pod netip.Prefix) []string {
	switch {
	case !p.SNAT:
		return nil
	case p.MasqAll:
		return []string{""}
	case pod.Addr().Is4():
		return []string{"-s " + pod.Masked().String() + " ", "-s 127.0.0.1/32 "}
	}
	return []string{"-s " + pod.Masked().String() + " "}
}

// hostIPFirst sorts ports with a hostIP first, because the first matching rule decides.
func hostIPFirst(list []ports.Port) []ports.Port {
	sorted := slices.Clone(list)
	slices.SortStableFunc(sorted, func(a, b ports.Port) int { return cmp.Compare(b.HostIP.BitLen(), a.HostIP.BitLen()) })
	return sorted
}

// jumpLines returns the iptables-restore lines of the rules that jump to the pod's chain, and of the removal of stale ones. Rules for ports
// with a hostIP precede those without, also those of other pods.
func jumpLines(nat iptables.Table, key attachment.Key, of iptablesRules, list []ports.Port) []string {
	chain := podChain(key)
	lines := nat.Deletions(dnatChain, chain)
	_, words := of.conditionsOf(list[0].To.Addr().Is4())
	var conditions strings.Builder
	for _, word := range words {
		fmt.Fprintf(&conditions, "\"%s\" ", word)
	}
	comment := iptables.Comment(fmt.Sprintf("dnat name: %q id: %q", key.Network, key.ContainerID))
	for _, named := range []bool{true, false} {
		command := map[bool]string{true: "-I", false: "-A"}[named]
		byProtocol := map[string][]string{}
		for _, p := range list {
			if p.HostIP.IsValid() == named {
				byProtocol[p.Protocol] = append(byProtocol[p.Protocol], fmt.Sprint(p.Port))
			}
		}
		for _, protocol := range []string{"tcp", "udp", "sctp"} {
			for list := range slices.Chunk(byProtocol[protocol], maxMultiport) {
				lines = append(lines, fmt.Sprintf(`%s %s -p %s -m comment --comment %s -m multiport --dports %s %s-j %s`,
					command, dnatChain, protocol, comment, strings.Join(list, ","), conditions.String(), chain))
			}
		}
	}
	return lines
}
