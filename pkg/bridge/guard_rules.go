// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/nft"
)

// guardSchema is the version number of the table.
const guardSchema = 3

// guardPriority places the chain before any bridge code sees the frame, and so before the bridge learns the sender's MAC.
const guardPriority = -300

// guardChain is the base chain of the table.
const guardChain = "prerouting"

// Registers: the interface name fills the first 16-byte register. The value that is looked up with it begins in the second.
const (
	regLink  = 1
	regValue = 2
)

// Offsets of the addresses in the network header, and of the neighbour discovery target in the ICMPv6 header.
const (
	source4, destination4 = 12, 16
	source6, destination6 = 8, 24
	target6               = 8
)

type guardRules struct {
	nft.Ruleset
	sets map[string]*nftables.Set
}

// guardSet is a set of the table. Its key is the name of the port and these fields.
type guardSet struct {
	name string
	key  []nftables.SetDatatype
}

func guardSets() []guardSet {
	return []guardSet{{"mac_ports", nil}, {"macs", []nftables.SetDatatype{nftables.TypeEtherAddr}}, {"ports", nil},
		{"addresses4", []nftables.SetDatatype{nftables.TypeIPAddr}}, {"addresses6", []nftables.SetDatatype{nftables.TypeIP6Addr}}}
}

// buildGuards writes the static rules and returns the sets by name. Each port is an element of the sets.
func buildGuards(r nft.Ruleset) (sets map[string]*nftables.Set, err error) {
	g := guardRules{r, map[string]*nftables.Set{}}
	for _, s := range guardSets() {
		if g.sets[s.name], err = g.Set(s.name, nil, append([]nftables.SetDatatype{nftables.TypeIFName}, s.key...)...); err != nil {
			return nil, err
		}
	}
	mac, arp, ip, igmp := g.Chain("mac", nil, 0, ""), g.Chain("arp", nil, 0, ""), g.Chain("ip", nil, 0, ""), g.Chain("igmp", nil, 0, "")
	ip6, icmp6, all := g.Chain("ip6", nil, 0, ""), g.Chain("icmp6", nil, 0, ""), g.Chain("guard", nil, 0, "")
	g.Rule(mac, slices.Concat(g.notOwnedByPort(etherSource(), "macs"), nft.Drop())...)
	g.Rule(mac, slices.Concat(toBridge(), nft.Drop())...)
	for _, to := range []struct {
		kind  uint16
		chain *nftables.Chain
	}{{unix.ETH_P_IP, ip}, {unix.ETH_P_IPV6, ip6}, {unix.ETH_P_ARP, arp}} {
		g.Rule(all, etherType(), nft.Equal(nft.BigEndian(to.kind)), &expr.Verdict{Kind: expr.VerdictGoto, Chain: to.chain.Name})
	}
	g.Rule(all, nft.Drop()...) // VLAN tags, LLDP, spanning tree and other frames that a pod does not need
	g.arp(arp)
	g.ip(ip, igmp)
	g.igmp(igmp)
	g.ip6(ip6, icmp6)
	g.icmp6(icmp6)
	base := g.Chain(guardChain, nftables.ChainHookPrerouting, guardPriority, nftables.ChainTypeFilter)
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

// toBridge matches frames to 01:80:c2:00:00:01 to 0f, which the bridge itself consumes (IEEE 802.1Q, table 8-1), such as LACP and LLDP. The
// rules see them only because the port forwards them (kernel.NS.SetReserved).
func toBridge() []expr.Any {
	destination := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 0, Len: 6}
	return []expr.Any{destination, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: []byte{1, 0x80, 0xc2, 0, 0, 1},
		ToData: []byte{1, 0x80, 0xc2, 0, 0, 15}}}
}

// etherType loads the EtherType of the received frame. The kernel shows a VLAN tag there even if it stores the tag separately.
func etherType() expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 12, Len: 2}
}

func (g guardRules) lookup(set string, invert bool) expr.Any {
	return &expr.Lookup{SourceRegister: regLink, SetName: set, SetID: g.sets[set].ID, Invert: invert}
}

// ownedByPort matches if the set contains value together with the port's name.
func (g guardRules) ownedByPort(value expr.Any, set string) []expr.Any {
	return []expr.Any{inputLink(), value, g.lookup(set, false)}
}

// notOwnedByPort matches if the set does not contain value together with the port's name.
func (g guardRules) notOwnedByPort(value expr.Any, set string) []expr.Any {
	return []expr.Any{inputLink(), value, g.lookup(set, true)}
}

// networkField loads a part of the network header into the register after the interface name.
func networkField(offset, length uint32) expr.Any { return nft.Network(regValue, offset, length) }

// arp accepts ARP with the pod's own MAC and address (RFC 826), and probes for the pod's own address (RFC 5227), whose sender is 0.0.0.0.
// It rejects a probe for another pod's address, which would make that pod give the address up.
func (g guardRules) arp(chain *nftables.Chain) {
	g.Rule(chain, nft.Network(1, 4, 2), &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{6, 4}}, &expr.Verdict{Kind: expr.VerdictDrop})
	g.Rule(chain, slices.Concat(g.notOwnedByPort(networkField(8, 6), "macs"), nft.Drop())...)
	g.Rule(chain, slices.Concat(g.ownedByPort(networkField(14, 4), "addresses4"), nft.Accept())...)
	probe := []expr.Any{nft.Network(1, 6, 2), nft.Equal(nft.BigEndian(1)), nft.Network(1, 14, 4), nft.Equal(make([]byte, 4))}
	g.Rule(chain, slices.Concat(probe, g.ownedByPort(networkField(24, 4), "addresses4"), nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// carries matches packets with the given protocol after all extension headers.
func carries(protocol byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.Equal([]byte{protocol})}
}

// carriesNot matches packets with another protocol. It does not match packets that the kernel cannot parse: wrong lengths, another IP
// version, or extension headers that continue in a later fragment.
func carriesNot(protocol byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{protocol}}}
}

// message matches ICMP, IGMP and ICMPv6 of a type. It does not match later fragments, whose type is unknown.
func message(protocol, kind byte) []expr.Any {
	return append(carries(protocol), transport(0, 1), nft.Equal([]byte{kind}))
}

func udpTo(port uint16) []expr.Any {
	return append(carries(unix.IPPROTO_UDP), transport(2, 2), nft.Equal(nft.BigEndian(port)))
}

func transport(offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
}

// DHCP ports. A client accepts an answer from any port.
const (
	dhcpClient, dhcpServer = 68, 67
	dhcp6Client            = 546
)

// Protocols that only routers use: OSPF (RFC 2328), PIM (RFC 7761), VRRP (RFC 9568) and CARP.
const (
	ospf = 89
	pim  = 103
	vrrp = 112
)

// ICMP types (RFC 792, RFC 1256) and IGMP types (RFC 2236, RFC 3376).
const (
	redirect4 = 5
	advert4   = 9
	report4   = 0x12
	report4v2 = 0x16
	leave4    = 0x17
	report4v3 = 0x22
)

func (g guardRules) dropAll(chain *nftables.Chain, what ...[]expr.Any) {
	for _, matched := range what {
		g.Rule(chain, slices.Concat(matched, nft.Drop())...)
	}
}

// ip accepts packets from the pod's own addresses, except those of routers and DHCP servers. It also accepts a DHCP client without an
// address.
func (g guardRules) ip(chain, igmp *nftables.Chain) {
	g.Rule(chain, append(carries(unix.IPPROTO_IGMP), &expr.Verdict{Kind: expr.VerdictGoto, Chain: igmp.Name})...)
	g.dropAll(chain, message(unix.IPPROTO_ICMP, redirect4), message(unix.IPPROTO_ICMP, advert4))
	g.dropAll(chain, udpTo(dhcpClient), carries(ospf), carries(vrrp))
	g.Rule(chain, slices.Concat(g.ownedByPort(networkField(source4, 4), "addresses4"), carriesNot(pim), nft.Accept())...)
	discover := append(udpTo(dhcpServer), transport(0, 2), nft.Equal(nft.BigEndian(dhcpClient)))
	g.Rule(chain, slices.Concat([]expr.Any{nft.Network(1, source4, 4), nft.Equal(make([]byte, 4))}, discover, nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// igmp accepts multicast group members. It rejects queries and router advertisements (RFC 4286), because either makes the bridge send all
// multicast to the pod. It rejects fragments, which group members never send.
func (g guardRules) igmp(chain *nftables.Chain) {
	for _, kind := range []byte{report4, report4v2, leave4, report4v3} {
		g.Rule(chain, slices.Concat(message(unix.IPPROTO_IGMP, kind), g.ownedByPort(networkField(source4, 4), "addresses4"), nft.Accept())...)
	}
	g.Rule(chain, nft.Drop()...)
}

// ICMPv6 types (RFC 2710, 3810, 4286 and 4861).
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
	mrdAdvert     = 151
	mrdEnd        = 153
)

func icmp6(kind byte) []expr.Any { return message(unix.IPPROTO_ICMPV6, kind) }

// target loads the target address of a neighbour discovery message.
func target() expr.Any {
	return &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseTransportHeader, Offset: target6, Len: 16}
}

// ip6 accepts packets from the pod's own addresses, except those of routers and DHCP servers. It drops IPv6 with an authentication header
// (AH): the kernel does not look past it, but a bridge looks for multicast queries there.
func (g guardRules) ip6(chain, icmp6 *nftables.Chain) {
	g.Rule(chain, append(carries(unix.IPPROTO_ICMPV6), &expr.Verdict{Kind: expr.VerdictGoto, Chain: icmp6.Name})...)
	g.dropAll(chain, udpTo(dhcp6Client), carries(ospf), carries(pim), carries(vrrp))
	g.Rule(chain, slices.Concat(g.ownedByPort(networkField(source6, 16), "addresses6"), carriesNot(unix.IPPROTO_AH), nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// icmp6 accepts messages that claim only the pod's own addresses. A pod must not act as a router or multicast querier. Without an address
// it may only probe for one of its own.
func (g guardRules) icmp6(chain *nftables.Chain) {
	own := g.ownedByPort(networkField(source6, 16), "addresses6")
	unspecified := []expr.Any{nft.Network(1, source6, 16), nft.Equal(make([]byte, 16))}
	g.dropAll(chain, icmp6(mldQuery), icmp6(routerAdvert), icmp6(redirect), icmp6(mrdAdvert), icmp6(mrdEnd))
	g.Rule(chain, slices.Concat(icmp6(neighAdvert), g.ownedByPort(target(), "addresses6"), own, nft.Accept())...)
	g.dropAll(chain, icmp6(neighAdvert)) // also a fragment without the target
	g.Rule(chain, slices.Concat(own, nft.Accept())...)
	g.Rule(chain, slices.Concat(unspecified, icmp6(neighSolicit), g.ownedByPort(target(), "addresses6"), nft.Accept())...)
	for _, kind := range []byte{routerSolicit, mldReport, mldDone, mldReport2} {
		g.Rule(chain, slices.Concat(unspecified, icmp6(kind), nft.Accept())...)
	}
	g.Rule(chain, nft.Drop()...)
}
