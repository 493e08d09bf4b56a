// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// Portmap handles the rules that the reference portmap plugin creates for an attachment's hostPorts, in all known variants.
type Portmap Attachment

// HostportChain is the chain in the iptables nat table that jumps to the chains of attachments.
const HostportChain = "CNI-HOSTPORT-DNAT"

// Chain returns the name of the attachment's chain in the iptables nat table.
func (p Portmap) Chain() string { return p.chains()[HostportChain][0] }

func (p Portmap) chains() iptables.Chains {
	return iptables.Chains{HostportChain: hashNames(p.Hashes, "CNI-DN-", 21), "CNI-HOSTPORT-SNAT": hashNames(p.Hashes, "CNI-SN-", 21)}
}

// portRules returns the reference plugin's nftables table, whose rules for hostPorts are in several chains.
func portRules(is4 bool) nft.Place {
	return nft.Place{Family: familyOf(is4).Proto, Table: "cni_hostport"}
}

// Remove removes the rules. It is a no-op if there are none.
func (p Portmap) Remove() error {
	err := nft.Remove("nft delete hostPort rules that the reference plugins left", nft.Removal{
		Chains: p.chains().Jumps(),
		Rules:  []nft.Match{{In: portRules(true), Want: p.isRule}, {In: portRules(false), Want: p.isRule}},
	})
	return errors.Join(err, p.chains().RemoveLegacy())
}

// isRule reports whether an nftables rule belongs to the attachment. The reference plugin's comment contains only the container ID, so two
// networks of one container differ only in the addresses.
func (p Portmap) isRule(of nft.Rule) bool {
	if of.Comment != p.ContainerID {
		return false
	}
	return len(p.Addresses) == 0 || slices.ContainsFunc(p.Addresses, func(a netip.Addr) bool { return of.Has(a.AsSlice()) })
}

// HasPort reports whether the nftables rules of the reference plugin forward the port to the pod.
func (p Portmap) HasPort(port ports.Port) (bool, error) {
	list, err := nft.ListRules(portRules(port.Is4()))
	return slices.ContainsFunc(list, func(r nft.Rule) bool {
		return r.Comment == p.ContainerID && r.Has([]byte{port.Number()}) && r.Has(nft.BigEndian(port.Port)) &&
			r.Has(nft.BigEndian(port.To.Port())) &&
			r.Has(port.To.Addr().AsSlice()) && (!port.HostIP.IsValid() || r.Has(port.HostIP.AsSlice()))
	}), err
}

// HasChain reports whether iptables may have a chain for the ports of the attachment.
func (p Portmap) HasChain() (bool, error) {
	if iptables.LegacyUsed(true) || iptables.LegacyUsed(false) {
		return true, nil
	}
	t, err := nft.Open("")
	if err != nil {
		return false, err
	}
	defer t.Close()
	for _, jump := range (iptables.Chains{HostportChain: p.chains()[HostportChain]}).Jumps() {
		has, err := t.HasChain(nft.Place{Family: jump.Parent.Family, Table: jump.Parent.Table, Chain: jump.Chain})
		if has || err != nil {
			return has, err
		}
	}
	return false, nil
}

// Write forwards ports with the nftables rules of version 1.9 of the reference plugin. It is a no-op if they exist.
func (p Portmap) Write(list []ports.Port) error {
	missing := false
	for _, port := range list {
		ok, err := p.HasPort(port)
		if err != nil {
			return err
		}
		missing = missing || !ok
	}
	if !missing {
		return nil
	}
	return nft.Build("nft add hostPort rules for the reference plugins", func(c *nftables.Conn) error {
		for _, is4 := range []bool{true, false} {
			if own := ports.OfFamily(list, is4); len(own) > 0 {
				p.writeFamily(c, familyOf(is4), own)
			}
		}
		return nil
	})
}

func (p Portmap) writeFamily(c *nftables.Conn, f addressFamily, list []ports.Port) {
	h := nft.NewRuleset(c, &nftables.Table{Name: portRules(true).Table, Family: nftables.TableFamily(f.Proto)})
	chain := c.AddChain(&nftables.Chain{Table: h.Table, Name: "hostports"})
	byIP := c.AddChain(&nftables.Chain{Table: h.Table, Name: "hostip_hostports"})
	all := h.Chain("hostports_all", nil, 0, "")
	h.Rule(all, &expr.Verdict{Kind: expr.VerdictJump, Chain: byIP.Name})
	h.Rule(all, &expr.Verdict{Kind: expr.VerdictJump, Chain: chain.Name})
	for name, hook := range map[string]*nftables.ChainHook{"prerouting": nftables.ChainHookPrerouting, "output": nftables.ChainHookOutput} {
		base := h.Chain(name, hook, int(*nftables.ChainPriorityNATDest), nftables.ChainTypeNAT)
		h.Rule(base, &expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true}, nft.Equal(nft.Native(unix.RTN_LOCAL)),
			&expr.Verdict{Kind: expr.VerdictJump, Chain: all.Name})
	}
	for _, port := range list {
		var match []expr.Any
		if port.HostIP.IsValid() {
			match = f.isAddress(f.Destination, port.HostIP)
		}
		h.Commented(chain, p.ContainerID, slices.Concat(match,
			[]expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.Equal([]byte{port.Number()}),
				nft.DestinationPort(1), nft.Equal(nft.BigEndian(port.Port)),
				&expr.Immediate{Register: 1, Data: port.To.Addr().AsSlice()}, &expr.Immediate{Register: 2, Data: nft.BigEndian(port.To.Port())},
				&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.Proto), RegAddrMin: 1, RegProtoMin: 2}}))
	}
	if !list[0].SNAT {
		return
	}
	policy := nftables.ChainPolicyAccept
	back := c.AddChain(&nftables.Chain{Table: h.Table, Name: "masquerading", Type: nftables.ChainTypeNAT,
		Hooknum:  nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource, Policy: &policy})
	to := list[0].To.Addr()
	sources := []netip.Addr{to}
	if to.Is4() {
		sources = append(sources, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	for _, source := range sources {
		h.Commented(back, p.ContainerID, slices.Concat(f.isAddress(f.Source, source), f.isAddress(f.Destination, to), []expr.Any{&expr.Masq{}}))
	}
}
