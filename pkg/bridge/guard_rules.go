// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/nft"
)

// guardSchema is the version of the table.
const guardSchema = 2

// guardPriority: before the bridge looks at a frame at all, and so before it learns from it which port has a MAC.
const guardPriority = -300

// Registers: an interface name fills the first of 16 bytes, what is looked up with it begins in the second.
const (
	regLink  = 1
	regValue = 2
)

// Offsets of the addresses in the network header.
const (
	source4, destination4 = 12, 16
	source6, destination6 = 8, 24
)

type guardRules struct {
	nft.Ruleset
	sets map[string]*nftables.Set
}

// guardSet is a set of the table, with the fields of its key behind the name of the port.
type guardSet struct {
	name string
	key  []nftables.SetDatatype
}

func guardSets() []guardSet {
	return []guardSet{{"mac_ports", nil}, {"macs", []nftables.SetDatatype{nftables.TypeEtherAddr}}, {"ports", nil},
		{"addresses4", []nftables.SetDatatype{nftables.TypeIPAddr}}, {"addresses6", []nftables.SetDatatype{nftables.TypeIP6Addr}}}
}

// buildGuards writes the rules, which are static, and returns the sets by name: a port is an element of the sets.
func buildGuards(c *nftables.Conn) (sets map[string]*nftables.Set, err error) {
	g := guardRules{nft.NewRuleset(c, nft.TableOf(nft.GuardTable).Netlink()), map[string]*nftables.Set{}}
	for _, s := range guardSets() {
		if g.sets[s.name], err = g.Set(s.name, nil, append([]nftables.SetDatatype{nftables.TypeIFName}, s.key...)...); err != nil {
			return nil, err
		}
	}
	mac, arp, ip := g.Chain("mac", nil, 0, ""), g.Chain("arp", nil, 0, ""), g.Chain("ip", nil, 0, "")
	ip6, all := g.Chain("ip6", nil, 0, ""), g.Chain("guard", nil, 0, "")
	g.Rule(mac, slices.Concat(g.not(etherSource(), "macs"), nft.Drop())...)
	for _, to := range []struct {
		kind  uint16
		chain *nftables.Chain
	}{{unix.ETH_P_IP, ip}, {unix.ETH_P_IPV6, ip6}, {unix.ETH_P_ARP, arp}} {
		g.Rule(all, etherType(), nft.Equal(nft.BigEndian(to.kind)), &expr.Verdict{Kind: expr.VerdictGoto, Chain: to.chain.Name})
	}
	g.Rule(all, nft.Drop()...) // VLAN tags, LLDP, spanning tree and everything else that a pod has no use for
	g.arp(arp)
	g.ip(ip)
	g.ip6(ip6)
	base := g.Chain("prerouting", nftables.ChainHookPrerouting, guardPriority, nftables.ChainTypeFilter)
	for _, to := range []struct {
		set   string
		chain *nftables.Chain
	}{{"mac_ports", mac}, {"ports", all}} {
		g.Rule(base, inputLink(), g.lookup(to.set, false), &expr.Verdict{Kind: expr.VerdictJump, Chain: to.chain.Name})
	}
	return g.sets, g.Mark(guardSchema)
}

func inputLink() expr.Any { return &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regLink} }

func etherSource() expr.Any {
	return &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}
}

// etherType is that of the frame as it came: the kernel shows a VLAN tag there even when it keeps it apart.
func etherType() expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 12, Len: 2}
}

func (g guardRules) lookup(set string, invert bool) expr.Any {
	return &expr.Lookup{SourceRegister: regLink, SetName: set, SetID: g.sets[set].ID, Invert: invert}
}

// of matches what a port may use: value is in the set together with the port's name.
func (g guardRules) of(value expr.Any, set string) []expr.Any {
	return []expr.Any{inputLink(), value, g.lookup(set, false)}
}

// not is the opposite of of.
func (g guardRules) not(value expr.Any, set string) []expr.Any {
	return []expr.Any{inputLink(), value, g.lookup(set, true)}
}

// at loads a part of the network header behind the interface name.
func at(offset, length uint32) expr.Any { return nft.Network(regValue, offset, length) }

// arp lets through what tells the pod's own MAC and address (RFC 826), and probes for an address (RFC 5227), whose sender is 0.0.0.0.
func (g guardRules) arp(chain *nftables.Chain) {
	g.Rule(chain, nft.Network(1, 4, 2), &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{6, 4}}, &expr.Verdict{Kind: expr.VerdictDrop})
	g.Rule(chain, slices.Concat(g.not(at(8, 6), "macs"), nft.Drop())...)
	g.Rule(chain, slices.Concat(g.of(at(14, 4), "addresses4"), nft.Accept())...)
	probe := []expr.Any{nft.Network(1, 6, 2), nft.Equal(nft.BigEndian(1)), nft.Network(1, 14, 4), nft.Equal(make([]byte, 4))}
	g.Rule(chain, slices.Concat(probe, nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

func udp(source, destination uint16) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.Equal([]byte{unix.IPPROTO_UDP}),
		transport(0, 4), nft.Equal(append(nft.BigEndian(source), nft.BigEndian(destination)...))}
}

func transport(offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
}

// ip lets through what comes from the pod's own addresses and is no DHCP server's, and a DHCP client that has no address yet.
func (g guardRules) ip(chain *nftables.Chain) {
	g.Rule(chain, slices.Concat(udp(67, 68), nft.Drop())...)
	g.Rule(chain, slices.Concat(g.of(at(source4, 4), "addresses4"), nft.Accept())...)
	g.Rule(chain, slices.Concat([]expr.Any{nft.Network(1, source4, 4), nft.Equal(make([]byte, 4))}, udp(68, 67), nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// Types of ICMPv6 (RFC 2710, 3810 and 4861).
const (
	mldQuery      = 130
	mldReport     = 131
	mldDone       = 132
	routerSolicit = 133
	routerAdvert  = 134
	neighSolicit  = 135
	neighAdvert   = 136
	redirect      = 137
	mldReport2    = 143
)

func icmp6(kind byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.Equal([]byte{unix.IPPROTO_ICMPV6}),
		transport(0, 1), nft.Equal([]byte{kind})}
}

// ip6 lets through what comes from the pod's own addresses and claims no other: a pod is no router, no DHCP server and no multicast
// querier, and answers for its own addresses alone. Without an address yet it may only look for one.
func (g guardRules) ip6(chain *nftables.Chain) {
	for _, kind := range []byte{routerAdvert, redirect, mldQuery} {
		g.Rule(chain, slices.Concat(icmp6(kind), nft.Drop())...)
	}
	g.Rule(chain, slices.Concat(udp(547, 546), nft.Drop())...)
	target := &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseTransportHeader, Offset: 8, Len: 16}
	g.Rule(chain, slices.Concat(icmp6(neighAdvert), g.not(target, "addresses6"), nft.Drop())...)
	g.Rule(chain, slices.Concat(g.of(at(source6, 16), "addresses6"), nft.Accept())...)
	for _, kind := range []byte{neighSolicit, routerSolicit, mldReport, mldDone, mldReport2} {
		g.Rule(chain, slices.Concat([]expr.Any{nft.Network(1, source6, 16), nft.Equal(make([]byte, 16))}, icmp6(kind), nft.Accept())...)
	}
	g.Rule(chain, nft.Drop()...)
}
