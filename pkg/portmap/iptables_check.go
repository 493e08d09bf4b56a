// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// IPTablesIntact reports whether the shared rules exist for each address family in use. It starts no program and so does not see the rules
// of iptables-legacy. Rules that it cannot read count as intact.
func IPTablesIntact() bool {
	all, err := allRecorded()
	if err != nil {
		return true
	}
	for _, is4 := range []bool{true, false} {
		if !slices.ContainsFunc(all, func(rec recordedPorts) bool { return rec.byIPTables(is4) }) || iptables.IsLegacy(is4) {
			continue
		}
		for _, hook := range []string{"PREROUTING", "OUTPUT"} {
			list, err := nft.ListRules(iptables.Place(is4, hook))
			if err == nil && !slices.ContainsFunc(list, func(r nft.Rule) bool { return r.Jump == dnatChain }) {
				return false
			}
		}
	}
	return true
}

func checkIPTables(key attachment.Key, list []ports.Port) error {
	for _, is4 := range []bool{true, false} {
		own := ports.OfFamily(list, is4)
		if len(own) == 0 {
			continue
		}
		nat, err := iptables.List(is4, "PREROUTING", "OUTPUT", dnatChain, podChain(key), markChain, "POSTROUTING", masqChain)
		if err != nil {
			return withHint(err)
		}
		if err := checkRules(nat, podChain(key), own); err != nil {
			return err
		}
	}
	return nil
}

func checkRules(nat iptables.Table, chain string, list []ports.Port) error {
	for _, hook := range []string{"PREROUTING", "OUTPUT"} {
		if len(nat.Rules(hook, "-j "+dnatChain+" ")) == 0 {
			return plugin.Differs("iptables chain %s: the jump to %s is missing", hook, dnatChain)
		}
	}
	if err := checkForeignRules(nat, chain); err != nil {
		return err
	}
	led, own := portsJumpingTo(nat, chain), byPort(nat.Rules(chain))
	for _, p := range list {
		if !led[fmt.Sprint(p.Protocol, p.Port)] {
			return plugin.Differs("hostPort %s: in iptables chain %s the jump to %s is missing", p, dnatChain, chain)
		}
		rules := iptables.Table{chain: own[p.Port]}
		match := "-p " + p.Protocol + " "
		marks := len(rules.Rules(chain, match)) - len(rules.Rules(chain, match, "-j DNAT "))
		if len(rules.Rules(chain, match, "--to-destination "+p.To.String()+" ")) == 0 || p.SNAT && marks == 0 {
			return plugin.Differs("hostPort %s: its rule in iptables chain %s is missing", p, chain)
		}
	}
	return checkMasquerade(nat, chain)
}

// checkForeignRules fails if a rule of another program keeps packets from Podlace's rules: in the hostPort chains, any that ends the
// evaluation of the chain; in PREROUTING and OUTPUT, one that matches every packet. It is not removed, because the nat table is shared.
func checkForeignRules(nat iptables.Table, chain string) error {
	for _, place := range []struct{ chain, ours string }{
		{"PREROUTING", dnatChain}, {"OUTPUT", dnatChain}, {dnatChain, chain}, {chain, ""},
	} {
		for _, rule := range nat[place.chain] {
			target := valueOf(rule, "-j")
			if place.ours != "" && target == place.ours {
				break
			}
			ends := slices.Contains([]string{"ACCEPT", "RETURN", "DROP", "REDIRECT"}, target) ||
				target == "DNAT" && place.ours != ""
			all := place.chain == dnatChain || strings.HasPrefix(rule, "-A "+place.chain+" -j ") || // our rules match an address or a port
				place.chain == chain && valueOf(rule, "-d") == "" && valueOf(rule, "--dport") == ""
			if ends && all {
				return plugin.WithHint(
					plugin.Differs("iptables chain %s: a rule of another program comes before those of hostPorts: %s",
						place.chain, strings.TrimSpace(rule)), "remove it with 'iptables -t nat -D' or 'ip6tables -t nat -D'; 'podlace reload' leaves it")
			}
		}
	}
	return nil
}

// checkMasquerade fails if a pod's chain marks packets but the masquerade rules for this mark are missing.
func checkMasquerade(nat iptables.Table, chain string) error {
	if len(nat.Rules(chain, "-j "+markChain+" ")) == 0 {
		return nil // another program's chain marks the packets, or none does
	}
	for _, need := range []struct{ chain, target string }{
		{markChain, "-j MARK "}, {"POSTROUTING", "-j " + masqChain + " "}, {masqChain, "-j MASQUERADE "},
	} {
		if len(nat.Rules(need.chain, need.target)) == 0 {
			return plugin.Differs("iptables chain %s: the rule with %sis missing", need.chain, need.target)
		}
	}
	return nil
}

// portsJumpingTo returns the node ports with a jump to the pod's chain, each with its protocol as prefix, such as tcp80.
func portsJumpingTo(nat iptables.Table, chain string) map[string]bool {
	led := map[string]bool{}
	for _, rule := range nat.Rules(dnatChain, "-j "+chain+" ") {
		for port := range strings.SplitSeq(valueOf(rule, "--dports"), ",") {
			led[valueOf(rule, "-p")+port] = true
		}
	}
	return led
}

// byPort groups rules by node port, because a pod can have thousands of rules and CHECK looks for each port.
func byPort(rules []string) map[uint16][]string {
	of := map[uint16][]string{}
	for _, rule := range rules {
		if port, err := strconv.ParseUint(valueOf(rule, "--dport"), 10, 16); err == nil {
			of[uint16(port)] = append(of[uint16(port)], rule)
		}
	}
	return of
}

// valueOf returns the value of an option in the text of a rule.
func valueOf(rule, option string) string {
	_, value, _ := strings.Cut(rule, " "+option+" ")
	value, _, _ = strings.Cut(value, " ")
	return value
}
