// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/nft"
)

func guardSchema() nft.Schema {
	return nft.Schema{Table: nft.GuardTable, Version: 4, Build: buildGuards}
}

// guardPriority makes the chain run before all bridge code, so that the bridge does not learn the source MAC of a dropped frame.
const guardPriority = -300

const guardChain = "prerouting"

// Registers whose contents the rules look up together in a set. The interface name fills regLink, which has 16 bytes; regValue gets an
// address or another field of the packet.
const (
	regLink  = 1
	regValue = 2
)

// Byte offsets of the source address in the IP header, of the target address in a neighbour discovery message (ICMPv6), and of the
// destination address of the packet that an ICMP error quotes.
const (
	source4 = 12
	source6 = 8
	target6 = 8
	quoted4 = 8 + 16
	quoted6 = 8 + 24
)

type guardRules struct{ nft.Ruleset }

// guardSet is a set of the guard table. Its elements are the port's name and, unless key is nil, an address of this type.
type guardSet struct {
	name string
	key  []nftables.SetDatatype
}

func guardSets() []guardSet {
	return []guardSet{{"mac_ports", nil}, {"macs", []nftables.SetDatatype{nftables.TypeEtherAddr}}, {"ports", nil},
		{"addresses4", []nftables.SetDatatype{nftables.TypeIPAddr}}, {"addresses6", []nftables.SetDatatype{nftables.TypeIP6Addr}},
		{"hairpin", []nftables.SetDatatype{nftables.TypeIFName}}}
}

// buildGuards writes the rules of the guard table, which are the same for any number of pods. The pods' ports are elements of its sets.
func buildGuards(r nft.Ruleset) error {
	g := guardRules{r}
	for _, s := range guardSets() {
		if _, err := g.Set(s.name, nil, append([]nftables.SetDatatype{nftables.TypeIFName}, s.key...)...); err != nil {
			return err
		}
	}
	mac, all := g.Chain("mac", nil, 0, ""), g.Chain("guard", nil, 0, "")
	g.Rule(mac, slices.Concat(g.notOwnedByPort(etherSource(), "macs"), nft.Drop())...)
	g.Rule(mac, slices.Concat(toBridge(), nft.Drop())...)
	g.addIPRules(g.part(all, "ip", etherType(), nft.Equal(nft.BigEndian(unix.ETH_P_IP))))
	g.addIP6Rules(g.part(all, "ip6", etherType(), nft.Equal(nft.BigEndian(unix.ETH_P_IPV6))))
	g.addARPRules(g.part(all, "arp", etherType(), nft.Equal(nft.BigEndian(unix.ETH_P_ARP))))
	g.Rule(all, nft.Drop()...) // VLAN tags, LLDP, spanning tree and other frames that a pod does not need
	base := g.Chain(guardChain, nftables.ChainHookPrerouting, guardPriority, nftables.ChainTypeFilter)
	for _, to := range []struct {
		set   string
		chain *nftables.Chain
	}{{"mac_ports", mac}, {"ports", all}} {
		g.Rule(base, inputLink(), g.lookup(to.set, false), &expr.Verdict{Kind: expr.VerdictJump, Chain: to.chain.Name})
	}
	g.addHairpinRules()
	return nil
}

// part adds a chain, and a rule of another chain that sends matched packets there. They do not return, so others pass few rules.
func (g guardRules) part(of *nftables.Chain, name string, matched ...expr.Any) *nftables.Chain {
	chain := g.Chain(name, nil, 0, "")
	g.Rule(of, append(matched, &expr.Verdict{Kind: expr.VerdictGoto, Chain: name})...)
	return chain
}

func inputLink() expr.Any { return &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regLink} }

func etherSource() expr.Any {
	return &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}
}

// toBridge matches destinations from 01:80:c2:00:00:01 to 0f (IEEE 802.1Q, table 8-1), such as LACP and LLDP, whose frames a bridge
// processes itself. The rules see them only because kernel.NS.SetReserved makes the port forward them.
func toBridge() []expr.Any {
	destination := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 0, Len: 6}
	return []expr.Any{destination, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: []byte{1, 0x80, 0xc2, 0, 0, 1},
		ToData: []byte{1, 0x80, 0xc2, 0, 0, 15}}}
}

// etherType loads the frame's EtherType: that of a VLAN tag, such as 0x8100, if there is one, even if the kernel has taken it out of the
// frame.
func etherType() expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 12, Len: 2}
}

func (g guardRules) lookup(set string, invert bool) expr.Any {
	return &expr.Lookup{SourceRegister: regLink, SetName: set, SetID: g.Named(set).ID, Invert: invert}
}

// ownedByPort matches if the set contains the port's name with the value.
func (g guardRules) ownedByPort(value expr.Any, set string) []expr.Any {
	return []expr.Any{inputLink(), value, g.lookup(set, false)}
}

// notOwnedByPort matches if the set does not contain the port's name with the value.
func (g guardRules) notOwnedByPort(value expr.Any, set string) []expr.Any {
	return []expr.Any{inputLink(), value, g.lookup(set, true)}
}

// networkField loads a field of the network header into regValue, which follows the interface name in regLink.
func networkField(offset, length uint32) expr.Any { return nft.Network(regValue, offset, length) }

// addARPRules accepts ARP packets with the pod's own MAC and address (RFC 826), and probes for this address, whose sender is 0.0.0.0 (RFC
// 5227). A probe for another pod's address is dropped, because that pod would give up the address.
func (g guardRules) addARPRules(chain *nftables.Chain) {
	g.Rule(chain, nft.Network(1, 4, 2), &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{6, 4}}, &expr.Verdict{Kind: expr.VerdictDrop})
	g.Rule(chain, slices.Concat(g.notOwnedByPort(networkField(8, 6), "macs"), nft.Drop())...)
	g.Rule(chain, slices.Concat(g.ownedByPort(networkField(14, 4), "addresses4"), nft.Accept())...)
	probe := []expr.Any{nft.Network(1, 6, 2), nft.Equal(nft.BigEndian(1)), nft.Network(1, 14, 4), nft.Equal(make([]byte, 4))}
	g.Rule(chain, slices.Concat(probe, g.ownedByPort(networkField(24, 4), "addresses4"), nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// matchProtocol matches packets with the given transport protocol, after all extension headers.
func matchProtocol(protocol byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, nft.Equal([]byte{protocol})}
}

// matchOtherProtocol matches packets with any other transport protocol. Neither function matches a packet that the kernel cannot parse,
// which has wrong lengths, another IP version, or extension headers that continue in a later fragment.
func matchOtherProtocol(protocol byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{protocol}}}
}

// matchMessage matches ICMP, IGMP and ICMPv6 messages of the given type. Only a first fragment matches, because later ones lack the type.
// No type may be 0x60 to 0x6f: in a later IPv6 fragment, some kernels compare the first byte of the IPv6 header instead.
func matchMessage(protocol, kind byte) []expr.Any {
	return append(matchProtocol(protocol), transport(0, 1), nft.Equal([]byte{kind}))
}

func udpTo(port uint16) []expr.Any {
	return append(matchProtocol(unix.IPPROTO_UDP), transport(2, 2), nft.Equal(nft.BigEndian(port)))
}

func transport(offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
}

// transportValue loads a field behind the network header into regValue, which follows the interface name in regLink.
func transportValue(offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
}

// UDP ports of DHCP. The rules match the client's, because it accepts an answer from any server port.
const (
	dhcpClient, dhcpServer = 68, 67
	dhcp6Client            = 546
)

// IP protocols of routers: OSPF (RFC 2328), PIM (RFC 7761), VRRP (RFC 9568) and CARP.
const (
	ospf = 89
	pim  = 103
	vrrp = 112
)

// Message types of ICMP (RFC 792, RFC 1256) and IGMP (RFC 2236, RFC 3376).
const (
	unreachable4 = 3 // also "fragmentation needed"
	redirect4    = 5
	advert4      = 9
	exceeded4    = 11
	parameter4   = 12
	report4      = 0x12
	report4v2    = 0x16
	leave4       = 0x17
	report4v3    = 0x22
)

func (g guardRules) dropAll(chain *nftables.Chain, what ...[]expr.Any) {
	for _, matched := range what {
		g.Rule(chain, slices.Concat(matched, nft.Drop())...)
	}
}

// addErrorRules accepts ICMP errors of an owned source that quote a packet to an owned address, as those of a router that masquerades do.
// Others could lower the path MTU of other pods' connections, or end them, so they are dropped.
func (g guardRules) addErrorRules(chain *nftables.Chain, set string, source, quoted expr.Any, messages ...[]expr.Any) {
	for _, message := range messages {
		g.Rule(chain, slices.Concat(message, g.ownedByPort(source, set), g.ownedByPort(quoted, set), nft.Accept())...)
		g.dropAll(chain, message)
	}
}

// addIPRules accepts IPv4 packets from the pod's own addresses and from a DHCP client without one, but none that only routers and DHCP
// servers send.
func (g guardRules) addIPRules(chain *nftables.Chain) {
	g.addIGMPRules(g.part(chain, "igmp", matchProtocol(unix.IPPROTO_IGMP)...))
	g.addICMPRules(g.part(chain, "icmp", matchProtocol(unix.IPPROTO_ICMP)...))
	g.addDHCPRules(g.part(chain, "dhcp", udpTo(dhcpServer)...))
	g.dropAll(chain, udpTo(dhcpClient), matchProtocol(ospf), matchProtocol(vrrp))
	g.Rule(chain, slices.Concat(g.ownedByPort(networkField(source4, 4), "addresses4"), matchOtherProtocol(pim), nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

func (g guardRules) addICMPRules(chain *nftables.Chain) {
	icmp := func(kind byte) []expr.Any { return matchMessage(unix.IPPROTO_ICMP, kind) }
	g.dropAll(chain, icmp(redirect4), icmp(advert4))
	g.addErrorRules(chain, "addresses4", networkField(source4, 4), transportValue(quoted4, 4), icmp(unreachable4), icmp(exceeded4),
		icmp(parameter4))
	g.Rule(chain, slices.Concat(g.ownedByPort(networkField(source4, 4), "addresses4"), nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// addDHCPRules accepts requests to DHCP servers with the pod's own MAC, because a server may enter it into its neighbour table (RFC 2131
// section 4.1), and those of relays, whose answers go to the relay.
func (g guardRules) addDHCPRules(chain *nftables.Chain) {
	own := g.ownedByPort(networkField(source4, 4), "addresses4")
	ownMAC := append([]expr.Any{transport(9, 2), nft.Equal([]byte{1, 6})}, g.ownedByPort(transportValue(36, 6), "macs")...)
	unspecified := []expr.Any{nft.Network(1, source4, 4), nft.Equal(make([]byte, 4)), transport(0, 2), nft.Equal(nft.BigEndian(dhcpClient))}
	relayed := []expr.Any{transport(32, 4), &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)}}
	g.Rule(chain, slices.Concat(ownMAC, own, nft.Accept())...)
	g.Rule(chain, slices.Concat(ownMAC, unspecified, nft.Accept())...)
	g.Rule(chain, slices.Concat(relayed, own, nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// addIGMPRules accepts the messages of multicast group members. It drops queries and multicast router advertisements (RFC 4286), which
// would make the bridge send all multicast traffic to the pod, and fragments, which group members never send.
func (g guardRules) addIGMPRules(chain *nftables.Chain) {
	for _, kind := range []byte{report4, report4v2, leave4, report4v3} {
		own := g.ownedByPort(networkField(source4, 4), "addresses4")
		g.Rule(chain, slices.Concat(matchMessage(unix.IPPROTO_IGMP, kind), own, nft.Accept())...)
	}
	g.Rule(chain, nft.Drop()...)
}

// Message types of ICMPv6 (RFC 2710, 3810, 4286, 4443 and 4861).
const (
	unreachable   = 1
	tooBig        = 2
	exceeded      = 3
	parameter     = 4
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

func icmp6(kind byte) []expr.Any { return matchMessage(unix.IPPROTO_ICMPV6, kind) }

// targetAddress loads the target address of a neighbour discovery message.
func targetAddress() expr.Any { return transportValue(target6, 16) }

// addIP6Rules accepts IPv6 packets from the pod's own addresses, but none that only routers and DHCP servers send. It drops packets with an
// authentication header (AH), because a bridge looks for multicast queries behind it, and nftables does not.
func (g guardRules) addIP6Rules(chain *nftables.Chain) {
	g.addICMP6Rules(g.part(chain, "icmp6", matchProtocol(unix.IPPROTO_ICMPV6)...))
	g.dropAll(chain, udpTo(dhcp6Client), matchProtocol(ospf), matchProtocol(pim), matchProtocol(vrrp))
	g.Rule(chain, slices.Concat(g.ownedByPort(networkField(source6, 16), "addresses6"), matchOtherProtocol(unix.IPPROTO_AH), nft.Accept())...)
	g.Rule(chain, nft.Drop()...)
}

// addICMP6Rules accepts an ICMPv6 message if the pod owns all addresses that it claims. It drops those of routers and multicast queriers.
// From the unspecified address, a pod may join groups.
func (g guardRules) addICMP6Rules(chain *nftables.Chain) {
	own := g.ownedByPort(networkField(source6, 16), "addresses6")
	unspecified := []expr.Any{nft.Network(1, source6, 16), nft.Equal(make([]byte, 16))}
	g.dropAll(chain, icmp6(mldQuery), icmp6(routerAdvert), icmp6(redirect), icmp6(mrdAdvert), icmp6(mrdEnd))
	nd := g.Chain("nd", nil, 0, "")
	g.addNDRules(nd)
	for _, kind := range []byte{neighSolicit, neighAdvert, routerSolicit} {
		g.Rule(chain, append(icmp6(kind), &expr.Verdict{Kind: expr.VerdictGoto, Chain: nd.Name})...)
	}
	g.addErrorRules(chain, "addresses6", networkField(source6, 16), transportValue(quoted6, 16), icmp6(unreachable), icmp6(tooBig),
		icmp6(exceeded), icmp6(parameter))
	g.Rule(chain, slices.Concat(own, nft.Accept())...)
	for _, kind := range []byte{mldReport, mldDone, mldReport2} {
		g.Rule(chain, slices.Concat(unspecified, icmp6(kind), nft.Accept())...)
	}
	g.Rule(chain, nft.Drop()...)
}

// Options of neighbour discovery (RFC 4861, RFC 3971). Those that a pod needs have 8 octets.
const (
	sourceMAC  = 1
	targetMAC  = 2
	nonce      = 14
	optionSize = 8
)

// bareSize matches messages of neighbour discovery that are size octets long and follow the IPv6 header directly: no further option, header
// or fragment can hide in them.
func bareSize(size byte) []expr.Any {
	return []expr.Any{nft.Network(1, 4, 3), nft.Equal([]byte{0, size, unix.IPPROTO_ICMPV6})}
}

// withOption matches messages of neighbour discovery of size octets that are followed by exactly one option, which is of the given kind.
func withOption(size, kind byte) []expr.Any {
	return append(bareSize(size+optionSize), transport(uint32(size), 2), nft.Equal([]byte{kind, optionSize / 8}))
}

// addNDRules accepts neighbour discovery (RFC 4861) that leads neighbours only to the port's own addresses and MAC. From the unspecified
// address, a pod may solicit routers and probe for its own addresses, with or without a nonce (RFC 7527).
func (g guardRules) addNDRules(chain *nftables.Chain) {
	const neighbour, router = 24, 8 // octets of the messages without options
	own := g.ownedByPort(networkField(source6, 16), "addresses6")
	unspecified := []expr.Any{nft.Network(1, source6, 16), nft.Equal(make([]byte, 16))}
	accept := func(matched ...[]expr.Any) { g.Rule(chain, slices.Concat(append(matched, nft.Accept())...)...) }
	g.dropAll(chain, append(icmp6(neighAdvert), g.notOwnedByPort(targetAddress(), "addresses6")...))
	for _, m := range []struct{ kind, size, option byte }{
		{neighSolicit, neighbour, sourceMAC}, {neighAdvert, neighbour, targetMAC}, {routerSolicit, router, sourceMAC}} {
		accept(icmp6(m.kind), bareSize(m.size), own)
		accept(icmp6(m.kind), withOption(m.size, m.option), g.ownedByPort(transportValue(uint32(m.size)+2, 6), "macs"), own)
	}
	accept(unspecified, icmp6(routerSolicit), bareSize(router))
	for _, size := range [][]expr.Any{bareSize(neighbour), withOption(neighbour, nonce)} {
		accept(unspecified, icmp6(neighSolicit), size, g.ownedByPort(targetAddress(), "addresses6"))
	}
	g.Rule(chain, nft.Drop()...)
}
