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

// hostportPriority lets the chains of kube-proxy run first, which translates at -100, so Services take precedence over hostPorts
// (CVE-2019-9946).
const hostportPriority = -99

// hostports builds the hostPort table.
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
			// A packet from ::1 never reaches a pod. Thanks to this rule, the connection is refused at once instead of timing out.
			ipv6 := nft.FamilyOf(false)
			h.Rule(chain, slices.Concat(ipv6.Only(), []expr.Any{nft.Network(1, ipv6.Destination, ipv6.Length),
				nft.Equal(netip.IPv6Loopback().AsSlice()),
				&expr.Verdict{Kind: expr.VerdictReturn}})...)
		}
		// Only packets for the node itself are forwarded, never those in transit (CVE-2025-67499).
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
	// In a range, the port of the pod equals that of the node.
	same := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.Proto), RegAddrMin: 1}
	for _, any := range []struct {
		set *nftables.Set
		to  *expr.NAT
	}{{sets["ports"], dnat}, {sets["ranges"], same}} {
		h.Rule(forward, slices.Concat(f.Only(), []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.DestinationPort(9),
			nft.Lookup(any.set), any.to})...)
	}

	masquerade := &expr.Masq{}
	// matchMapped matches packets whose address at offset belongs to a pod to which the client's original destination port is mapped.
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
		// This matches a pod that connects to its own hostPort. With bridge-nf-call-iptables, the bridge forwards such a packet itself and this
		// chain sees no incoming interface, hence the match by addresses.
		h.Rule(snat, slices.Concat(matchMapped(f.Source, sets["snat"+suffix]), []expr.Any{masquerade})...)
	}
	if f.Digit == "4" {
		h.Rule(snat, slices.Concat(matchLoopback(f.Source), []expr.Any{masquerade})...)
	}
	h.Rule(snat, &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 2}, &expr.Lookup{SourceRegister: 1, SetName: hairpin.Name, SetID: hairpin.ID}, masquerade)
	return nil
}

// familySets creates the sets of an address family. No rule uses "taken", which contains the ports of the iptables backend: ADDs of other
// pods read it to find conflicts.
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
