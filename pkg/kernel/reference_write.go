// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nft"
	"golang.org/x/sys/unix"
)

// EnsureReferenceMasquerade masquerades addresses, with the lengths of their subnets, by rules as the reference writes them to nftables.
// Destinations in except see the address itself. When the rules are there they are left alone: without them, if only for a moment, a connection would begin that never gets an answer.
func (n *Node) EnsureReferenceMasquerade(ref Reference, addresses, except []netip.Prefix) error {
	has, err := nft.ListRules(nft.Place{Family: unix.NFPROTO_INET, Table: referenceMasquerade, Chain: referenceMasqChain})
	if err != nil || !slices.ContainsFunc(addresses, func(a netip.Prefix) bool {
		return !slices.ContainsFunc(has, func(r nft.Rule) bool { return ref.isMasquerade(r) && r.Has(a.Addr().AsSlice()) })
	}) {
		return err
	}
	return nft.Build("nft add masquerade rules for the reference plugins", func(c *nftables.Conn) error {
		table := c.AddTable(&nftables.Table{Name: referenceMasquerade, Family: nftables.TableFamilyINet})
		h := nft.NewRuleset(c, table)
		checks := c.AddChain(&nftables.Chain{Table: table, Name: referenceMasqChain})
		// The reference gives its chain no policy; the default is the same.
		base := h.Chain("postrouting", nftables.ChainHookPostrouting, int(*nftables.ChainPriorityNATSource), nftables.ChainTypeNAT)
		for i, f := range []family{ipv4, ipv6} {
			p := netip.MustParsePrefix(multicast[i])
			h.Rule(base, slices.Concat(f.only(), f.subnet(f.destination, p, expr.CmpOpEq), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}})...)
		}
		h.Rule(base, &expr.Verdict{Kind: expr.VerdictGoto, Chain: checks.Name})
		comment := fmt.Sprintf("%s, net: %s, if: %s, id: %s", ref.masqueradePrefix(), ref.Network, ref.IfName, ref.ContainerID)
		for _, a := range addresses {
			f := familyOf(a.Addr())
			comment := comment[:min(len(comment), nft.MaxComment)]
			for _, p := range except {
				if p.Addr().Is4() == a.Addr().Is4() {
					h.Commented(checks, comment, slices.Concat(f.only(), f.is(f.source, a.Addr()), f.subnet(f.destination, p, expr.CmpOpEq),
						[]expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}))
				}
			}
			h.Commented(checks, comment, slices.Concat(f.only(), f.is(f.source, a.Addr()),
				f.subnet(f.destination, a.Masked(), expr.CmpOpNeq), []expr.Any{&expr.Masq{}}))
		}
		return nil
	})
}

// EnsureReferencePorts forwards ports by rules as the reference (1.9) writes them to nftables, unless they are there.
func (n *Node) EnsureReferencePorts(ref Reference, ports []HostPort) error {
	missing := false
	for _, p := range ports {
		ok, err := n.HasReferencePort(ref, p)
		if err != nil {
			return err
		}
		missing = missing || !ok
	}
	if !missing {
		return nil
	}
	return nft.Build("nft add hostPort rules for the reference plugins", func(c *nftables.Conn) error {
		for _, f := range []family{ipv4, ipv6} {
			var own []HostPort
			for _, p := range ports {
				if p.To.Addr().Is4() == (f.digit == ipv4.digit) {
					own = append(own, p)
				}
			}
			if len(own) > 0 {
				f.referencePorts(c, ref, own)
			}
		}
		return nil
	})
}

// referencePorts writes the ports of one family, in the table of that family.
func (f family) referencePorts(c *nftables.Conn, ref Reference, ports []HostPort) {
	table := c.AddTable(&nftables.Table{Name: referenceHostports, Family: nftables.TableFamily(f.proto)})
	h := nft.NewRuleset(c, table)
	chain := c.AddChain(&nftables.Chain{Table: table, Name: "hostports"})
	byIP := c.AddChain(&nftables.Chain{Table: table, Name: "hostip_hostports"})
	all := h.Chain("hostports_all", nil, 0, "")
	h.Rule(all, &expr.Verdict{Kind: expr.VerdictJump, Chain: byIP.Name})
	h.Rule(all, &expr.Verdict{Kind: expr.VerdictJump, Chain: chain.Name})
	for name, hook := range map[string]*nftables.ChainHook{"prerouting": nftables.ChainHookPrerouting, "output": nftables.ChainHookOutput} {
		base := h.Chain(name, hook, int(*nftables.ChainPriorityNATDest), nftables.ChainTypeNAT)
		h.Rule(base, &expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true}, nft.Equal(nft.Native(unix.RTN_LOCAL)),
			&expr.Verdict{Kind: expr.VerdictJump, Chain: all.Name})
	}
	for _, p := range ports {
		var match []expr.Any
		if p.HostIP.IsValid() {
			match = f.is(f.destination, p.HostIP)
		}
		h.Commented(chain, ref.ContainerID, slices.Concat(match, []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.Equal(p.protocol()),
			nft.DestinationPort(1), nft.Equal(nft.BigEndian(p.Port)),
			&expr.Immediate{Register: 1, Data: p.To.Addr().AsSlice()}, &expr.Immediate{Register: 2, Data: nft.BigEndian(p.To.Port())},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.proto), RegAddrMin: 1, RegProtoMin: 2}}))
	}
	if !ports[0].SNAT {
		return
	}
	policy := nftables.ChainPolicyAccept
	back := c.AddChain(&nftables.Chain{Table: table, Name: "masquerading", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource, Policy: &policy})
	to := ports[0].To.Addr()
	sources := []netip.Addr{to}
	if to.Is4() {
		sources = append(sources, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	for _, source := range sources {
		h.Commented(back, ref.ContainerID, slices.Concat(f.is(f.source, source), f.is(f.destination, to), []expr.Any{&expr.Masq{}}))
	}
}

// EnsureReferenceSpoofCheck lets only frames of one MAC through a port of a bridge, by chains as the reference writes them (macspoofchk),
// unless they are there.
func (n *Node) EnsureReferenceSpoofCheck(ref Reference, link string, mac net.HardwareAddr) error {
	if ok, err := n.HasReferenceSpoofCheck(ref); ok || err != nil {
		return err
	}
	return nft.Build("nft add check of MACs for the reference plugins", func(c *nftables.Conn) error {
		r := nft.NewRuleset(c, &nftables.Table{Name: "nat", Family: nftables.TableFamilyBridge})
		policy := nftables.ChainPolicyAccept
		base := c.AddChain(&nftables.Chain{Table: r.Table, Name: spoofParent, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
			Priority: nftables.ChainPriorityRef(-300), Policy: &policy})
		comment := "macspoofchk-" + ref.ContainerID + "-" + ref.IfName
		port, macs := r.Chain(ref.spoofChain(), nil, 0, ""), r.Chain(ref.spoofChain()+"-mac", nil, 0, "")
		r.Commented(macs, comment, []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}, nft.Equal(mac),
			&expr.Verdict{Kind: expr.VerdictReturn}})
		r.Commented(macs, comment, []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}})
		r.Commented(port, comment, []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: macs.Name}})
		r.Commented(base, comment, []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, nft.Equal(nft.IfName(link)),
			&expr.Verdict{Kind: expr.VerdictJump, Chain: port.Name}})
		return nil
	})
}

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return ipv4
	}
	return ipv6
}

// is matches one address of the header at the offset.
func (f family) is(offset uint32, a netip.Addr) []expr.Any {
	return []expr.Any{nft.Network(1, offset, f.length), nft.Equal(a.AsSlice())}
}

// subnet compares the address of the header at the offset with a subnet.
func (f family) subnet(offset uint32, p netip.Prefix, op expr.CmpOp) []expr.Any {
	if p.Bits() > 0 && p.Bits()%8 == 0 { // as nft(8) writes it
		length := uint32(p.Bits() / 8)
		return []expr.Any{nft.Network(1, offset, length), &expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()[:length]}}
	}
	mask, none := make([]byte, f.length), make([]byte, f.length)
	for bit := range p.Bits() {
		mask[bit/8] |= 1 << (7 - bit%8)
	}
	return []expr.Any{nft.Network(1, offset, f.length), &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: f.length, Mask: mask, Xor: none},
		&expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()}}
}

// ReferenceBackend returns the backend that the reference takes: the one that is named, else iptables where it is installed.
func ReferenceBackend(named string) string {
	switch {
	case named != "":
		return named
	case iptables.Installed(true):
		return "iptables"
	}
	return "nftables"
}

// multicast is never masqueraded: a receiver has no way to answer (RFC 1112, RFC 4291).
var multicast = [...]string{"224.0.0.0/4", "ff00::/8"}
