// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/nft"
)

// HostportSchema describes the hostPort table. All pods share its chains and rules, and their ports are elements of maps, so the cost of a
// packet does not depend on the number of pods.
func HostportSchema() nft.Schema {
	return nft.Schema{Table: nft.HostportTable, Version: 2, Build: buildHostports}
}

// hostportPriority is higher than the priority -100, at which kube-proxy translates addresses. The kernel therefore runs the chains of
// kube-proxy first, and Services take precedence over hostPorts (CVE-2019-9946).
const hostportPriority = -99

// The type hostports builds the hostPort table.
type hostports struct{ nft.Ruleset }

func buildHostports(r nft.Ruleset) error {
	h := hostports{r}
	hairpin, err := h.Set("hairpin", nil, nftables.TypeIFName, nftables.TypeIFName)
	if err == nil {
		_, err = h.Set("owners", nil, nftables.TypeMark, nftables.TypeMark)
	}
	if err != nil {
		return err
	}
	forward := h.Chain("forward_ports", nil, 0, "")
	for _, hook := range []struct {
		name string
		hook *nftables.ChainHook
	}{{"prerouting", nftables.ChainHookPrerouting}, {"output", nftables.ChainHookOutput}} {
		chain := h.Chain(hook.name, hook.hook, hostportPriority, nftables.ChainTypeNAT)
		if hook.hook == nftables.ChainHookOutput {
			// A packet from ::1 never reaches a pod. With this rule, the kernel refuses the connection to [::1] at once, so the client does
			// not wait for a reply.
			ipv6 := nft.FamilyOf(false)
			h.Rule(chain, slices.Concat(ipv6.Only(), []expr.Any{nft.Network(1, ipv6.Destination, ipv6.Length),
				nft.Equal(netip.IPv6Loopback().AsSlice()),
				&expr.Verdict{Kind: expr.VerdictReturn}})...)
		}
		// The hostPort rules apply only to packets for the node itself, never to forwarded traffic (CVE-2025-67499).
		h.Rule(chain, &expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true}, nft.Equal(nft.Native(unix.RTN_LOCAL)),
			&expr.Verdict{Kind: expr.VerdictJump, Chain: forward.Name})
	}
	back := h.Chain("postrouting", nftables.ChainHookPostrouting, int(*nftables.ChainPriorityNATSource), nftables.ChainTypeNAT)
	for _, f := range nft.Families() {
		if err := h.family(f, forward, back, hairpin); err != nil {
			return err
		}
	}
	return nil
}

func (h hostports) family(f nft.Family, forward, back *nftables.Chain, hairpin *nftables.Set) error {
	sets, err := h.familySets(f)
	if err != nil {
		return err
	}
	dnat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.Proto), RegAddrMin: 1, RegProtoMin: f.Second}
	h.Rule(forward, slices.Concat(f.Only(), []expr.Any{nft.Network(1, f.Destination, f.Length),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.Second}, nft.DestinationPort(f.Third), nft.Lookup(sets["hostip_ports"]), dnat})...)
	// For a range of ports, the port number in the pod equals the node port.
	same := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.Proto), RegAddrMin: 1}
	for _, any := range []struct {
		set *nftables.Set
		to  *expr.NAT
	}{{sets["ports"], dnat}, {sets["ranges"], same}} {
		h.Rule(forward, slices.Concat(f.Only(), []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.DestinationPort(9),
			nft.Lookup(any.set), any.to})...)
	}

	masquerade := &expr.Masq{}
	// matchMapped matches a packet if the address at the given offset of the IP header belongs to a pod, and the client's original destination
	// port is mapped to that pod.
	matchMapped := func(offset uint32, set *nftables.Set) []expr.Any {
		return []expr.Any{nft.Network(1, offset, f.Length), &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.Second},
			&expr.Ct{Key: expr.CtKeyPROTODST, Direction: 0, Register: f.Third}, &expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID}}
	}
	snat := h.Chain("snat"+f.Digit, nil, 0, "")
	for _, suffix := range []string{"", "_ranges"} {
		to := func(set string) []expr.Any {
			return slices.Concat(f.Only(), nft.Translated(), matchMapped(f.Destination, sets[set+suffix]))
		}
		h.Rule(back, slices.Concat(to("snat"), []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: snat.Name}})...)
		h.Rule(back, slices.Concat(to("masqall"), []expr.Any{masquerade})...)
		// This rule matches the packets of a pod that connects to its own hostPort. With bridge-nf-call-iptables, the bridge itself forwards such
		// a packet. The packet then has no incoming interface in this chain, so the rule matches the packet by its addresses.
		h.Rule(snat, slices.Concat(matchMapped(f.Source, sets["snat"+suffix]), []expr.Any{masquerade})...)
	}
	if f.Digit == "4" {
		h.Rule(snat, slices.Concat(matchLoopback(f.Source), []expr.Any{masquerade})...)
	}
	h.Rule(snat, &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 2}, &expr.Lookup{SourceRegister: 1, SetName: hairpin.Name, SetID: hairpin.ID}, masquerade)
	return nil
}

// familySets creates the sets of an address family. The set "taken" contains the ports that the iptables backend forwards. No rule uses the
// set "taken". The ADDs of other pods read the set "taken" to find conflicts.
func (h hostports) familySets(f nft.Family) (map[string]*nftables.Set, error) {
	target := []nftables.SetDatatype{f.Address, nftables.TypeInetService}
	any := []nftables.SetDatatype{nftables.TypeInetProto, nftables.TypeInetService}
	one := append([]nftables.SetDatatype{f.Address}, any...)
	sets := map[string]*nftables.Set{}
	var err error
	for _, s := range []struct {
		name       string
		value, key []nftables.SetDatatype
	}{{"hostip_ports", target, one}, {"ports", target, any}, {"snat", nil, one}, {"masqall", nil, one}, {"taken", nil, one}} {
		if sets[s.name], err = h.Set(s.name+f.Digit, s.value, s.key...); err != nil {
			return nil, err
		}
	}
	for _, s := range []struct {
		name  string
		value nftables.SetDatatype
		key   []nftables.SetDatatype
	}{{"ranges", f.Address, any}, {"snat_ranges", nftables.SetDatatype{}, one}, {"masqall_ranges", nftables.SetDatatype{}, one}} {
		if sets[s.name], err = h.Intervals(s.name+f.Digit, s.value, s.key...); err != nil {
			return nil, err
		}
	}
	return sets, nil
}
