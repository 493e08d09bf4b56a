// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nft"
)

// forwardPolicy reports firewalls that drop forwarded packets by default and have no rule that may accept those of Podlace's bridge. A rule
// in Podlace's own table would not help, because a packet must be accepted by the chains of all tables.
func (n *node) forwardPolicy() (found []Finding) {
	chains, err := nft.DroppingChains()
	if err != nil {
		return unknown("the chains of nf_tables", err)
	}
	enabled, err := n.setting("ENABLED", "/etc/ufw/ufw.conf")
	found = unknown("the configuration of ufw", err)
	backend, err := n.setting("FirewallBackend", "/etc/firewalld/firewalld.conf")
	found = append(found, unknown("the configuration of firewalld", err)...)
	ufw, blocked := enabled == "yes", map[string]nft.DroppingChain{}
	for _, chain := range chains {
		for _, bridge := range n.routedBridges() {
			switch {
			case chain.MayAccept(bridge):
			case n.running["firewalld"] && (chain.Table == "firewalld" || backend == "iptables" && isFORWARD(chain)):
				// n.firewalld reports it; another rule would be lost, or refused
			case ufw && isFORWARD(chain): // at each start, ufw removes rules that were added with iptables(8)
				blocked[bridge] = chain
			default:
				found = append(found, dropsForwarded("chain "+chain.String()+" of nf_tables "+chain.Reason, bridge, n.whoseChain(chain)))
			}
		}
	}
	if ufw {
		found = append(found, n.ufw(blocked)...)
	} else {
		found = append(found, n.legacyForward()...)
	}
	return append(found, n.firewalld()...)
}

// isFORWARD reports whether a chain is iptables' FORWARD, which ufw and Docker use.
func isFORWARD(chain nft.DroppingChain) bool {
	return chain.Family != "inet" && chain.Table == "filter" && chain.Chain == "FORWARD"
}

func dropsForwarded(evidence, bridge, command string) Finding {
	return Finding{Level: Error, What: "a firewall drops the packets of pods on " + bridge,
		Evidence:    evidence + ", and none of its rules accepts packets of " + bridge,
		Consequence: "pods reach nothing beyond their node, and hostPorts do not answer from outside",
		Command:     strings.ReplaceAll(command, "BRIDGE", bridge)}
}

// whoseChain returns the command that makes a chain accept a bridge's packets, which depends on the chain's usual owner, such as Docker.
func (n *node) whoseChain(chain nft.DroppingChain) string {
	program := "iptables"
	if chain.Family == "ip6" {
		program = "ip6tables"
	}
	if docker := slices.Contains(chain.Others, dockerUser); docker || isFORWARD(chain) {
		return acceptForwarded(program, docker)
	}
	return fmt.Sprintf("nft insert rule %s iifname BRIDGE accept; nft insert rule %[1]s oifname BRIDGE accept", chain)
}

// dockerUser is the chain from which Docker removes no rules (docs.docker.com, "Packet filtering and firewalls"). firewalld removes it with
// the other chains of iptables, and a Docker that started before firewalld does not notice.
const dockerUser = "DOCKER-USER"

// acceptForwarded returns the command that makes a variant of iptables accept a bridge's packets, if Docker's chain exists with this.
func acceptForwarded(program string, docker bool) string {
	chain := "FORWARD"
	if docker {
		chain = dockerUser
	}
	return fmt.Sprintf("%s -I %s -i BRIDGE -j ACCEPT; %[1]s -I %[2]s -o BRIDGE -j ACCEPT", program, chain)
}

// legacyForward reports bridges whose forwarded packets the policy of iptables-legacy drops, which nf_tables does not show.
func (n *node) legacyForward() (found []Finding) {
	for _, is4 := range []bool{true, false} {
		program := map[bool]string{true: "iptables-legacy", false: "ip6tables-legacy"}[is4]
		rules, err := iptables.LegacyFilter(is4)
		found = append(found, unknown("the rules of "+program, err)...)
		for _, bridge := range n.routedBridges() {
			if strings.Contains(rules, ":FORWARD DROP ") && !namesLink(rules, bridge) {
				command := acceptForwarded(program, strings.Contains(rules, ":"+dockerUser+" "))
				found = append(found, dropsForwarded("chain FORWARD of "+program+" has the policy drop", bridge, command))
			}
		}
	}
	return found
}

// namesLink reports whether an iptables rule for forwarded packets, so not in INPUT or OUTPUT, matches a link and does not drop packets. A
// plus sign ends a wildcard (iptables(8), -i).
func namesLink(rules, link string) bool {
	for rule := range strings.Lines(rules) {
		words := strings.Fields(rule)
		drops := strings.Contains(rule, " -j DROP") || strings.Contains(rule, " -j REJECT")
		if len(words) < 4 || words[1] == "INPUT" || words[1] == "OUTPUT" || drops {
			continue
		}
		for i, word := range words[:len(words)-1] {
			prefix, wild := strings.CutSuffix(words[i+1], "+")
			if (word == "-i" || word == "-o") && (words[i+1] == link || wild && strings.HasPrefix(link, prefix)) {
				return true
			}
		}
	}
	return false
}

// ufw reports bridges whose forwarded packets ufw drops or may drop; without a rule for the bridge it drops them (ufw-framework(8)).
// blocked has the nftables chain that drops each bridge's packets. It is empty if ufw uses iptables-legacy.
func (n *node) ufw(blocked map[string]nft.DroppingChain) (found []Finding) {
	policy, err := n.setting("DEFAULT_FORWARD_POLICY", "/etc/default/ufw")
	rules, failed := n.configText("/etc/ufw/user.rules")
	err = errors.Join(err, failed)
	found = unknown("the rules of ufw", err)
	for _, bridge := range n.routedBridges() {
		chain, drops := blocked[bridge]
		named := strings.Contains(rules, bridge)
		command := fmt.Sprintf("ufw route allow in on %s; ufw route allow out on %[1]s", bridge)
		switch {
		case drops && named:
			evidence := "/etc/ufw/user.rules names " + bridge + "; chain " + chain.String() + " " + chain.Reason
			found = append(found, dropsForwarded(evidence, bridge, "ufw reload"))
		case drops:
			found = append(found, dropsForwarded("ufw is enabled; chain "+chain.String()+" "+chain.Reason, bridge, command))
		case err == nil && !named && policy != "ACCEPT":
			found = append(found, Finding{Level: Warning, Code: "ufw-forward", What: "ufw may drop the packets of pods on " + bridge,
				Evidence:    "/etc/ufw/ufw.conf: ENABLED=yes; DEFAULT_FORWARD_POLICY is not ACCEPT; no rule in /etc/ufw/user.rules names " + bridge,
				Consequence: "pods reach nothing beyond their node",
				Command:     command})
		}
	}
	return found
}

// trustBridge needs no reload of firewalld, which drops packets for a moment and flushes the tables of iptables.
const trustBridge = "firewall-cmd --permanent --zone=trusted --change-interface=BRIDGE; firewall-cmd --zone=trusted --change-interface=BRIDGE"

// firewalld reports bridges in no zone. These are in the default zone, which rejects the packets of pods unless its target is ACCEPT
// (firewalld.zone(5)). Only files are read, so zones of the running configuration alone are not seen.
func (n *node) firewalld() (found []Finding) {
	if !n.running["firewalld"] {
		return nil
	}
	zones, err := n.configText("/etc/firewalld/zones/*.xml")
	if err != nil {
		return unknown("the zones of firewalld", err)
	}
	for _, bridge := range n.routedBridges() {
		if strings.Contains(zones, `<interface name="`+bridge+`"/>`) {
			continue
		}
		found = append(found, Finding{Level: Warning, Code: "firewalld-zone", What: "firewalld may reject the packets of pods on " + bridge,
			Evidence:    "firewalld runs, and no zone in /etc/firewalld/zones has the interface " + bridge + ", so it is in the default zone",
			Consequence: "pods reach neither each other nor TCP ports of their node, and nothing outside unless a zone names the uplink",
			Command:     strings.ReplaceAll(trustBridge, "BRIDGE", bridge)})
	}
	return found
}

// reloadUnit is the systemd unit that restores Podlace's rules as soon as they are removed.
const reloadUnit = "podlace-reload.service"

// firewallReload reports services that flush Podlace's rules when they start, unless reloadUnit is enabled or podlace-node restores them.
func (n *node) firewallReload() (found []Finding) {
	agent, err := readAgentStatus() // missing until podlace-node has started
	if n.enabled(reloadUnit) || n.running["podlace-node"] && (agent.Routes || err != nil) {
		return nil
	}
	flushes := ""
	if n.enabled("nftables.service") {
		rules, err := n.configText("/etc/nftables.conf")
		found = unknown("the rules of nftables.service", err)
		if strings.Contains(rules, "flush ruleset") {
			flushes = "/etc/nftables.conf contains 'flush ruleset', and nftables.service is enabled"
		}
	}
	chosen := func(net reconcile.Network) bool { return bytes.Contains(net.Text, []byte(`"iptables"`)) }
	if n.running["firewalld"] && slices.ContainsFunc(n.ownNetworks(), chosen) {
		flushes = "firewalld flushes the tables of iptables when it starts, reloads and stops, and a network has its rules there"
	}
	if flushes == "" {
		return found
	}
	return append(found, Finding{Level: Warning, What: "a firewall service removes Podlace's rules",
		Evidence:    flushes + "; " + reloadUnit + " is not enabled",
		Consequence: "until the next ADD or STATUS pods have no masquerade, hostPorts and protection",
		Command:     n.enableReload()})
}

// enableReload returns the command that enables reloadUnit, which the deb and the rpm install, not 'make install'. The restart also
// ends a program of an older version; enabling made systemd read the unit again.
func (n *node) enableReload() string {
	const command = "systemctl enable " + reloadUnit + "; systemctl restart " + reloadUnit
	if n.hasUnit(reloadUnit) {
		return command
	}
	return "install -m 644 conf/" + reloadUnit + " /etc/systemd/system/; " + command
}

// hasUnit reports whether the file of a systemd unit is installed.
func (n *node) hasUnit(name string) bool {
	dirs := []string{"/etc/systemd/system/", "/usr/local/lib/systemd/system/", "/usr/lib/systemd/system/", "/lib/systemd/system/"}
	return slices.ContainsFunc(dirs, func(dir string) bool { return n.exists(dir + name) })
}

// enabled reports whether another unit wants or requires a systemd unit (systemd.unit(5), [Install]).
func (n *node) enabled(unit string) bool {
	for _, dir := range []string{"/etc/systemd/system", "/run/systemd/system"} {
		for _, kind := range []string{"wants", "requires"} {
			if links, _ := filepath.Glob(n.path(dir + "/*." + kind + "/" + unit)); len(links) > 0 {
				return true
			}
		}
	}
	return false
}

// iptablesVariants reports nodes with tables of both iptables-legacy and iptables-nft, because each does not see the rules of the other.
func (n *node) iptablesVariants() []Finding {
	legacy, err := iptables.LegacyTables(true)
	if err != nil {
		return skipped("the kernel does not show the tables of iptables-legacy: " + err.Error())
	}
	if len(legacy) == 0 {
		return nil
	}
	tables, err := nft.IPTables()
	if err != nil {
		return unknown("the tables of nf_tables", err)
	}
	if len(tables) == 0 {
		return nil
	}
	return []Finding{{Level: Warning, What: "iptables-legacy and iptables-nft both have tables",
		Evidence:    fmt.Sprintf("/proc/net/ip_tables_names: %s; nf_tables: %s", strings.Join(legacy, ", "), strings.Join(tables, ", ")),
		Consequence: "each variant hides its rules from the other, and a packet has to pass both",
		Command:     "iptables-legacy-save; iptables-nft-save; then move the rules to one variant (update-alternatives --config iptables)"}}
}
