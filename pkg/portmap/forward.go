// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"log/slog"
	"net/netip"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// droppingChain is a chain that drops forwarded packets to and from a pod unless a rule accepts them. Podlace's plugins add no rule that
// accepts packets, because on a node with policy drop, the administrator of the firewall decides which packets may pass.
type droppingChain struct {
	text string
	fix  []string // commands that accept the pod's subnet in both directions
}

// warnForward warns about chains that may drop packets from other machines and pods to the ports. warnForward never returns an error,
// because a rule of the firewall may still accept the packets.
func warnForward(log *slog.Logger, host *kernel.Node, pod []netip.Prefix) {
	list, err := droppingChains(host, pod)
	if err != nil {
		log.Debug("the policy of the chain FORWARD is unknown", "error", err)
	}
	for _, o := range list {
		log.Warn(o.text, "fix", o.fix)
	}
}

func droppingChains(host *kernel.Node, pod []netip.Prefix) (list []droppingChain, err error) {
	chains, err := forwardDrops(host)
	if err != nil {
		return nil, err
	}
	for _, c := range chains {
		for _, p := range pod {
			if !c.Covers(p.Addr().Is4()) {
				continue
			}
			f, err := detectFirewall(host, c, p.Addr().Is4())
			if err != nil {
				return list, err
			}
			list = append(list, f.obstacle(c, p.Masked()))
		}
	}
	return list, nil
}

// firewallProgram is a program that manages a chain, such as ufw. Podlace recognizes a firewall program by a chain that only this program
// creates. The fields "to" and "from" contain the commands with which the firewall program accepts packets to and from a subnet.
type firewallProgram struct{ name, chain, to, from string }

func (f firewallProgram) obstacle(chain chainName, subnet netip.Prefix) droppingChain {
	text := fmt.Sprintf("chain %s has policy drop", chain)
	if f.name != "" {
		text += ", as " + f.name + " sets it"
	}
	return droppingChain{fmt.Sprintf("%s: unless a rule accepts %s, other machines and pods do not reach its hostPorts", text, subnet),
		[]string{fmt.Sprintf(f.to, subnet), fmt.Sprintf(f.from, subnet)}}
}

// detectFirewall returns the firewall that manages a chain.
func detectFirewall(host *kernel.Node, chain chainName, is4 bool) (firewallProgram, error) {
	program, family, ufw := "iptables", "ip", "ufw-user-forward"
	if !is4 {
		program, family, ufw = "ip6tables", "ip6", "ufw6-user-forward"
	}
	if !chain.IPTables() {
		rule := fmt.Sprintf("nft add rule %s %s ", chain, family)
		return firewallProgram{to: rule + "daddr %s accept", from: rule + "saddr %s accept"}, nil
	}
	for _, f := range []firewallProgram{
		{"Docker", "DOCKER-USER", program + " -I DOCKER-USER -d %s -j ACCEPT", program + " -I DOCKER-USER -s %s -j ACCEPT"},
		{"ufw", ufw, "ufw route allow to %s", "ufw route allow from %s"},
	} {
		if there, err := hasChain(host, filterChain(is4, f.chain)); err != nil || there {
			return f, err
		}
	}
	return firewallProgram{to: program + " -A FORWARD -d %s -j ACCEPT", from: program + " -A FORWARD -s %s -j ACCEPT"}, nil
}

// warnServices warns if kube-proxy is in nftables mode, because its chains have the same priority as the chains of iptables. Of two chains
// with the same priority, the kernel runs the newer chain first.
func warnServices(log *slog.Logger, host *kernel.Node, is4 bool) {
	services := chainName{Family: map[bool]string{true: "ip", false: "ip6"}[is4], Table: "kube-proxy", Name: "nat-prerouting"}
	if there, err := hasChain(host, services); err != nil || !there {
		return
	}
	log.Warn("kube-proxy is in nftables mode: a Service may lose its port at an address of the node to a hostPort of the iptables backend",
		"fix", "use backend nftables, whose hostPorts come after Services")
}

// warnHairpin logs a warning if a pod cannot reach its own hostPorts through its interface. If br_netfilter is on, the bridge itself
// forwards the packet after the address translation. The bridge sends a packet back through the bridge port from which it came only if this
// bridge port is in hairpin mode.
func warnHairpin(log *slog.Logger, host *kernel.Node, prev *types100.Result) {
	every, err := host.Get("bridge/bridge-nf-call-iptables")
	if err != nil {
		return // without br_netfilter
	}
	for _, i := range prev.Interfaces {
		port, ok, err := host.Link(i.Name)
		if i.Sandbox != "" || err != nil || !ok || port.Master == 0 || port.Port.Hairpin {
			continue
		}
		bridge, ok, err := host.LinkByIndex(port.Master)
		if err == nil && ok && bridge.Kind == "bridge" && (bridge.Filtered || every == "1") {
			log.Warn("the pod does not reach its own hostPorts: br_netfilter is on, and its port of the bridge has hairpin mode off",
				"bridge", bridge.Name, "port", port.Name, "fix", "set hairpinMode in the configuration of the main plugin")
		}
	}
}

// policyDrop is NF_DROP: the chain drops each packet that no rule accepts.
const policyDrop = 0

// chainName is the name of a chain in nf_tables. The chains in nf_tables include the chains of iptables-nft. The chains in nf_tables do not
// include the chains of iptables-legacy.
type chainName struct{ Family, Table, Name string }

// String returns the name in the form that 'nft list chain' expects.
func (c chainName) String() string { return c.Family + " " + c.Table + " " + c.Name }

// IPTables reports whether the commands iptables or ip6tables show this chain.
func (c chainName) IPTables() bool { return c.Family != "inet" }

// Covers reports whether packets of an address family pass through the chain.
func (c chainName) Covers(is4 bool) bool { return c.Family == "inet" || is4 == (c.Family == "ip") }

// filterChain returns the name of a chain in the filter table of iptables or ip6tables.
func filterChain(is4 bool, name string) chainName {
	if is4 {
		return chainName{"ip", "filter", name}
	}
	return chainName{"ip6", "filter", name}
}

// forwardDrops returns the chains that drop forwarded packets by policy. forwardDrops reads the chain FORWARD of iptables and ip6tables,
// because Docker and ufw change the policy of this chain. forwardDrops also reads the chain "forward" of table inet filter, which the
// nftables.conf of distributions creates. forwardDrops sends one request for each chain, regardless of the number of rules.
func forwardDrops(host *kernel.Node) (drops []chainName, err error) {
	for _, c := range []chainName{filterChain(true, "FORWARD"), filterChain(false, "FORWARD"), {"inet", "filter", "forward"}} {
		state, _, err := chain(host, c)
		if err != nil {
			return nil, err
		}
		if state.Base && state.Policy == policyDrop {
			drops = append(drops, c)
		}
	}
	return drops, nil
}

// hasChain reports whether a chain exists.
func hasChain(host *kernel.Node, c chainName) (bool, error) {
	_, has, err := chain(host, c)
	return has, err
}

func chain(host *kernel.Node, c chainName) (state nft.Chain, ok bool, err error) {
	t, err := host.NFT.Open("")
	if err != nil {
		return state, false, err
	}
	family := map[string]byte{"ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6, "inet": unix.NFPROTO_INET}[c.Family]
	return t.Chain(nft.Place{Family: family, Table: c.Table, Chain: c.Name})
}
