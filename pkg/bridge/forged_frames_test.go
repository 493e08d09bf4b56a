// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// ip4 returns an Ethernet frame with an IPv4 packet. flags are the fragment flags and the fragment offset in units of 8 bytes. The length
// of the options must be a multiple of 4 bytes.
func ip4(to, from net.HardwareAddr, src, dst netip.Addr, protocol byte, flags uint16, options []byte, body ...[]byte) []byte {
	data := slices.Concat(body...)
	length := be(uint16(20 + len(options) + len(data)))
	head := slices.Concat([]byte{byte(0x45 + len(options)/4), 0}, length, []byte{0, 1}, be(flags), []byte{1, protocol}, be(0), src.AsSlice(),
		dst.AsSlice(), options)
	copy(head[10:], checksum(head))
	return ether(to, from, unix.ETH_P_IP, head, data)
}

// igmp returns an IGMP message (RFC 2236, RFC 3376) with its checksum.
func igmp(kind byte, group netip.Addr, more ...byte) []byte {
	message := slices.Concat([]byte{kind, 10, 0, 0}, group.AsSlice(), more)
	copy(message[2:], checksum(message))
	return message
}

// icmp6Message returns an ICMPv6 message without the IPv6 header.
func icmp6Message(src, dst netip.Addr, kind byte, body ...[]byte) []byte {
	return icmp(make([]byte, 6), make([]byte, 6), src, dst, kind, body...)[54:]
}

// IPv6 extension headers (RFC 8200, RFC 4302), of 8 bytes each except the authentication header.
func hopByHop(next byte) []byte        { return []byte{next, 0, 5, 2, 0, 0, 1, 0} } // with a router alert
func destinationOptions(n byte) []byte { return []byte{n, 0, 1, 4, 0, 0, 0, 0} }
func routing(next byte) []byte         { return []byte{next, 0, 4, 0, 0, 0, 0, 0} }
func fragment(n byte, at uint16) []byte {
	return slices.Concat([]byte{n, 0}, be(at), []byte{0, 0, 0, 7})
}
func authentication(next byte) []byte {
	return slices.Concat([]byte{next, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, make([]byte, 12))
}

func groupMAC(group netip.Addr) net.HardwareAddr {
	b := group.AsSlice()
	if group.Is6() {
		return append(net.HardwareAddr{0x33, 0x33}, b[12:]...)
	}
	return net.HardwareAddr{1, 0, 0x5e, b[1] & 0x7f, b[2], b[3]}
}

const (
	moreFragments = 0x2000
	query4        = 0x11
	advertMRD4    = 0x30
	advertMRD6    = 151
)

// routerFrame is a frame with which a pod pretends to be a router or a multicast querier.
type routerFrame struct {
	what   string
	heeded bool // the bridge treats the sender's port as a router port (br_multicast_rcv in net/bridge/br_multicast.c)
	bytes  []byte
}

func routerGuises(m station) []routerFrame {
	var (
		all4, pim4, snoopers4 = netip.MustParseAddr("224.0.0.1"), netip.MustParseAddr("224.0.0.13"), netip.MustParseAddr("224.0.0.106")
		all6, pim6, snoopers6 = netip.MustParseAddr("ff02::1"), netip.MustParseAddr("ff02::d"), netip.MustParseAddr("ff02::6a")
		group, gateway        = netip.MustParseAddr("239.1.2.3"), netip.MustParseAddr("10.60.0.1")
		none                  = netip.IPv4Unspecified()
		alert                 = []byte{0x94, 4, 0, 0}
		hello                 = []byte{0x20, 0, 0xdf, 0xff}
		v1                    = slices.Concat([]byte{query4, 0}, checksum([]byte{query4, 0}), make([]byte, 4))
		v2                    = igmp(query4, none)
		delay                 = slices.Concat([]byte{0, 10}, make([]byte, 18))
		mld                   = icmp6Message(m.linkLo, all6, mldQuery, delay)
		mld2                  = icmp6Message(m.linkLo, all6, mldQuery, delay, []byte{2, 125, 0, 0})
		mrd6                  = icmp6Message(m.linkLo, snoopers6, advertMRD6, make([]byte, 4))
	)
	in4 := func(dst netip.Addr, protocol byte, flags uint16, options []byte, body []byte) []byte {
		return ip4(groupMAC(all4), m.mac, m.v4, dst, protocol, flags, options, body)
	}
	in6 := func(dst netip.Addr, first byte, body ...[]byte) []byte {
		return ip6(groupMAC(dst), m.mac, m.linkLo, dst, first, slices.Concat(body...))
	}
	forged := []routerFrame{
		{"IGMPv1 query", true, in4(all4, unix.IPPROTO_IGMP, 0, nil, v1)},
		{"IGMPv2 query", true, in4(all4, unix.IPPROTO_IGMP, 0, nil, v2)},
		{"IGMPv2 query for a group", false, in4(group, unix.IPPROTO_IGMP, 0, alert, igmp(query4, group))},
		{"IGMPv3 query with router alert", true, in4(all4, unix.IPPROTO_IGMP, 0, alert, igmp(query4, none, 2, 125, 0, 0))},
		{"IGMP query with 40 bytes of options", true, in4(all4, unix.IPPROTO_IGMP, 0, slices.Repeat([]byte{1}, 40), v2)},
		{"IGMP query, first fragment", true, in4(all4, unix.IPPROTO_IGMP, moreFragments, nil, v2)},
		{"IGMP query, later fragment", true, in4(all4, unix.IPPROTO_IGMP, 185, nil, v2)},
		{"IGMP query to a unicast address", false, in4(gateway, unix.IPPROTO_IGMP, 0, nil, v2)},
		{"MRD advertisement, IPv4", true, in4(snoopers4, unix.IPPROTO_IGMP, 0, alert, igmp(advertMRD4, none))},
		{"PIM hello, IPv4", true, in4(pim4, pim, 0, nil, hello)},
		{"MLDv1 query", true, in6(all6, 0, hopByHop(58), mld)},
		{"MLDv2 query", true, in6(all6, 0, hopByHop(58), mld2)},
		{"MLD query without hop-by-hop options", false, in6(all6, 58, mld)},
		{"MLD query with destination options", true, in6(all6, 0, hopByHop(60), destinationOptions(58), mld)},
		{"MLD query with a routing header", true, in6(all6, 0, hopByHop(43), routing(58), mld)},
		{"MLD query, first fragment", true, in6(all6, 0, hopByHop(44), fragment(58, 1), mld)},
		{"MLD query, the only fragment", true, in6(all6, 0, hopByHop(44), fragment(58, 0), mld)},
		{"MLD query behind AH", true, in6(all6, 0, hopByHop(51), authentication(58), mld)},
		{"MLD query behind a fragment header and AH", true, in6(all6, 0, hopByHop(44), fragment(51, 0), authentication(58), mld)},
		{"MRD advertisement, IPv6", true, in6(snoopers6, 0, hopByHop(58), mrd6)},
		{"MRD advertisement behind AH", true, in6(snoopers6, 0, hopByHop(51), authentication(58), mrd6)},
		{"PIM hello, IPv6", false, in6(pim6, pim, hello)},
	}
	frame := in4(all4, unix.IPPROTO_IGMP, 0, nil, igmp(query4, none, 0, 0, 0, 0))
	for kind, name := range map[uint16]string{unix.ETH_P_8021Q: "802.1Q", unix.ETH_P_8021AD: "802.1ad"} {
		forged = append(forged, routerFrame{"IGMP query in " + name, true, slices.Concat(frame[:12], be(kind), be(0), frame[12:])})
	}
	return forged
}

// leadsToRouter reports whether the pod's port is a multicast router port, as in 'bridge mdb show', and resets it to a normal one.
func (a attached) leadsToRouter() (found bool) {
	a.Helper()
	const routers = 2 // MDBA_ROUTER in include/uapi/linux/if_bridge.h
	link, err := netlink.LinkByName(a.hostVeth())
	if err != nil {
		a.Fatal(err)
	}
	req := nl.NewNetlinkRequest(unix.RTM_GETMDB, unix.NLM_F_DUMP)
	req.AddRawData([]byte{unix.AF_BRIDGE, 0, 0, 0, 0, 0, 0, 0})
	replies, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil {
		a.Fatal(err)
	}
	for _, reply := range replies {
		attrs, err := nl.ParseRouteAttr(reply[8:])
		if err != nil {
			a.Fatal(err)
		}
		for _, attr := range attrs {
			if attr.Attr.Type&^nl.NLA_F_NESTED != routers {
				continue
			}
			ports, err := nl.ParseRouteAttr(attr.Value)
			if err != nil {
				a.Fatal(err)
			}
			for _, port := range ports {
				found = found || int(binary.NativeEndian.Uint32(port.Value)) == link.Attrs().Index
			}
		}
	}
	// mcast_router: with 0 a port is never a router port, and with 1 the bridge learns whether a router is behind it (ip-link(8)).
	for _, value := range []string{"0", "1"} {
		if out, err := exec.Command("bridge", "link", "set", "dev", a.hostVeth(), "mcast_router", value).CombinedOutput(); err != nil {
			a.Fatalf("%v: %s", err, out)
		}
	}
	return found
}

// TestRouterPort (S-23): a guarded pod's port never becomes a multicast router port, to which all multicast goes. An unguarded one does.
func TestRouterPort(t *testing.T) {
	kerneltest.Slow(t)
	l := bareLab(t, "name", "routers", "bridge", "btr", "isGateway", false, "ipMasq", false)
	l.setBridged("0")
	t.Cleanup(func() { _ = onHost("btr", netlink.LinkDel) })
	// a bridge elects the querier with the lowest address
	guarded, other, v := l.add("guarded", "antiSpoof", true), l.other().add("other"), l.other().add("v")
	for _, sender := range []attached{guarded, other} {
		from, to := sender.station(), v.station()
		for _, g := range routerGuises(from) {
			arrivals(sender, v, [][]byte{g.bytes, udp4(to.mac, from.mac, from.v4, to.v4, 1, 2, "end")})
			if got, want := sender.leadsToRouter(), g.heeded && sender.id == "other"; got != want {
				t.Errorf("%s of the pod %s: its port leads to a router: %t, want %t", g.what, sender.id, got, want)
			}
		}
	}
}

// pair is the stations of two pods: m sends frames, v receives them.
type pair struct{ m, v station }

func (p pair) in4(protocol byte, flags uint16, options []byte, body ...[]byte) []byte {
	return ip4(p.v.mac, p.m.mac, p.m.v4, p.v.v4, protocol, flags, options, body...)
}

func (p pair) in6(first byte, body ...[]byte) []byte {
	return ip6(p.v.mac, p.m.mac, p.m.linkLo, p.v.linkLo, first, slices.Concat(body...))
}

// llc returns a frame with a length in place of the EtherType (IEEE 802.3).
func (p pair) llc(body ...[]byte) []byte {
	return ether(p.v.mac, p.m.mac, uint16(len(slices.Concat(body...))), body...)
}

func withType(kind uint16, frame []byte) []byte {
	return slices.Concat(frame[:12], be(kind), frame[14:])
}

func withByte(frame []byte, at int, value byte) []byte {
	f := slices.Clone(frame)
	f[at] = value
	return f
}

// datagram returns a UDP datagram without a checksum (0).
func datagram(source, destination uint16) []byte {
	return slices.Concat(be(source), be(destination), be(12), be(0), []byte("data"))
}

// harmlessFrames returns traffic that resembles a forgery but must pass.
func (p pair) harmlessFrames() []frame {
	var (
		group4, group6 = netip.MustParseAddr("239.1.2.3"), netip.MustParseAddr("ff05::1:3")
		alert, none    = []byte{0x94, 4, 0, 0}, make([]byte, 4)
		data           = datagram(1000, 2000)
	)
	return []frame{
		{"IGMPv1 report", always, p.in4(unix.IPPROTO_IGMP, 0, nil, igmp(report4, group4))},
		{"IGMPv2 report", always, p.in4(unix.IPPROTO_IGMP, 0, alert, igmp(report4v2, group4))},
		{"IGMPv2 leave", always, p.in4(unix.IPPROTO_IGMP, 0, alert, igmp(leave4, group4))},
		{"IGMPv3 report", always, p.in4(unix.IPPROTO_IGMP, 0, alert, []byte{report4v3, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0}, group4.AsSlice())},
		{"MLD report behind options", always, p.in6(0, hopByHop(58), icmp6Message(p.m.linkLo, p.v.linkLo, mldReport, none, group6.AsSlice()))},
		{"MLDv2 report behind options", always, p.in6(0, hopByHop(58), icmp6Message(p.m.linkLo, p.v.linkLo, mldReport2, none))},
		{"IPv4 first fragment", always, p.in4(unix.IPPROTO_UDP, moreFragments, nil, data, make([]byte, 12))},
		{"IPv4 later fragment", always, p.in4(unix.IPPROTO_UDP, 3, nil, data)},
		{"IPv4 with options", always, p.in4(unix.IPPROTO_UDP, 0, []byte{1, 1, 1, 0}, data)},
		{"IPv4 AH", always, p.in4(51, 0, nil, authentication(17), data)},
		{"IPv4 ESP", always, p.in4(unix.IPPROTO_ESP, 0, nil, data)},
		{"IPv4 ping", always, p.in4(unix.IPPROTO_ICMP, 0, nil, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0})},
		{"IPv6 first fragment", always, p.in6(44, fragment(17, 1), data, make([]byte, 12))},
		{"IPv6 later fragment", always, p.in6(44, fragment(17, 24), data)},
		{"IPv6 later fragment of a ping", always, p.in6(44, fragment(58, 24), data)},
		{"IPv6 with destination options", always, p.in6(60, destinationOptions(17), data)},
		{"IPv6 ESP", always, p.in6(unix.IPPROTO_ESP, data)},
		{"IPv6 without a next header", always, p.in6(59)},
		{"IPv6 ping", always, p.in6(58, icmp6Message(p.m.linkLo, p.v.linkLo, 128, none))},
	}
}

// forgeries returns frames with which a pod pretends to be a router, a server or a neighbour. Many are fragmented or hide behind extra
// headers or options that simple firewall rules do not look through.
func (p pair) forgeries() []frame {
	var (
		gateway4, gateway6 = netip.MustParseAddr("10.60.0.1"), netip.MustParseAddr("fd00:60::1")
		zero4, zero6       = netip.IPv4Unspecified(), netip.IPv6Unspecified()
		alert, none        = []byte{0x94, 4, 0, 0}, make([]byte, 4)
		lifetime           = []byte{64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0}
		advert             = icmp6Message(p.m.linkLo, p.v.linkLo, routerAdvert, lifetime)
		redirected         = icmp6Message(p.m.linkLo, p.v.linkLo, redirect, none, p.m.v6.AsSlice(), gateway6.AsSlice())
		claim              = icmp6Message(p.m.linkLo, p.v.linkLo, neighAdvert, []byte{0x60, 0, 0, 0}, gateway6.AsSlice())
		hello, priority    = []byte{0x20, 0, 0xdf, 0xff}, []byte{0x31, 1, 255, 1, 0, 100, 0, 0}
	)
	return []frame{
		{"S-23 PIM to a unicast address", forgery, p.in4(pim, 0, nil, hello)},
		{"S-23 VRRP", forgery, p.in4(112, 0, nil, priority, gateway4.AsSlice())},
		{"S-23 VRRP, IPv6", forgery, p.in6(112, priority, gateway6.AsSlice())},
		{"S-23 OSPF hello", forgery, p.in4(89, 0, nil, []byte{2, 1, 0, 44}, make([]byte, 40))},
		{"S-23 OSPF hello, IPv6", forgery, p.in6(89, []byte{3, 1, 0, 36}, make([]byte, 32))},
		{"S-23 ICMP redirect", forgery, p.in4(unix.IPPROTO_ICMP, 0, nil, []byte{5, 1, 0, 0}, p.m.v4.AsSlice(), make([]byte, 28))},
		{"S-23 ICMP router advertisement", forgery, p.in4(unix.IPPROTO_ICMP, 0, nil, []byte{9, 0, 0, 0, 1, 2, 7, 8}, p.m.v4.AsSlice(), none)},
		{"S-23 DHCP server from another port", forgery, udp4(p.v.mac, p.m.mac, p.m.v4, p.v.v4, 1067, 68, "offer")},
		{"S-23 DHCP server with options", forgery, p.in4(unix.IPPROTO_UDP, 0, alert, datagram(67, 68))},
		{"S-23 DHCP server, first fragment", forgery, p.in4(unix.IPPROTO_UDP, moreFragments, nil, be(67), be(68), be(400), be(0))},
		{"S-23 DHCPv6 server from another port", forgery, udp6(p.v.mac, p.m.mac, p.m.linkLo, p.v.linkLo, 1547, 546, "reply")},
		{"S-23 DHCPv6 server behind options", forgery, p.in6(60, destinationOptions(17), datagram(547, 546))},
		{"S-03 router advertisement behind AH", forgery, p.in6(51, authentication(58), advert)},
		{"S-03 router advertisement behind hop-by-hop options", forgery, p.in6(0, hopByHop(58), advert)},
		{"S-03 router advertisement behind destination options", forgery, p.in6(60, destinationOptions(58), advert)},
		{"S-03 router advertisement behind a routing header", forgery, p.in6(43, routing(58), advert)},
		{"S-03 router advertisement, first fragment", forgery, p.in6(44, fragment(58, 1), advert)},
		{"S-03 router advertisement, the only fragment", forgery, p.in6(44, fragment(58, 0), advert)},
		{"S-03 router advertisement behind all of them", forgery,
			p.in6(0, hopByHop(60), destinationOptions(43), routing(44), fragment(60, 0), destinationOptions(58), advert)},
		{"S-03 router advertisement, its options in a later fragment", forgery,
			p.in6(44, fragment(60, 9), destinationOptions(58), advert)},
		{"S-03 router advertisement, too long", forgery, withByte(p.in6(58, advert), 18, 9)},
		{"S-23 redirect behind AH", forgery, p.in6(51, authentication(58), redirected)},
		{"S-23 redirect, first fragment", forgery, p.in6(44, fragment(58, 1), redirected)},
		{"S-23 neighbour advertisement behind AH", forgery, p.in6(51, authentication(58), claim)},
		{"S-23 neighbour advertisement behind options", forgery, p.in6(60, destinationOptions(58), claim)},
		{"S-23 neighbour advertisement, first fragment without its target", forgery, p.in6(44, fragment(58, 1), claim[:8])},
		{"S-23 duplicate address detection of the victim", forgery,
			icmp(p.v.mac, p.m.mac, zero6, netip.MustParseAddr("ff02::1"), neighSolicit, none, p.v.v6.AsSlice())},
		{"S-25 ICMP error, first fragment without the address", forgery,
			p.in4(unix.IPPROTO_ICMP, moreFragments, nil, p.quoting4(p.v, 3, 4, p.v.v4, gateway4)[34:58])},
		{"S-25 ICMPv6 error, first fragment without the address", forgery,
			p.in6(44, fragment(58, 1), p.quoting6(p.v, 2, p.v.v6, gateway6)[54:86])},
		{"S-20 ARP probe for the victim", forgery, arpFrame(p.v.mac, p.m.mac, 1, p.m.mac, zero4, p.v.v4)},
	}
}

// encapsulatedForgeries returns forged frames with inconsistent headers or inside other protocols.
func (p pair) encapsulatedForgeries() []frame {
	data, plain4 := datagram(1000, 2000), udp4(p.v.mac, p.m.mac, p.m.v4, p.v.v4, 1000, 2000, "plain")
	arp := arpFrame(p.v.mac, p.m.mac, 2, p.m.mac, netip.MustParseAddr("10.60.0.1"), p.v.v4)
	return []frame{
		{"S-20 ARP with short addresses", forgery, withByte(arp, 18, 4)},
		{"S-20 ARP in 802.3 and SNAP", forgery, p.llc([]byte{0xaa, 0xaa, 3, 0, 0, 0, 8, 6}, arp[14:])},
		{"S-21 IPv4 in 802.3 and SNAP", forgery, p.llc([]byte{0xaa, 0xaa, 3, 0, 0, 0, 8, 0}, plain4[14:])},
		{"S-21 IPv4 in the 802.3 SAP of IP", forgery, p.llc([]byte{6, 6, 3}, plain4[14:])},
		{"S-21 IPv4 in a raw 802.3 frame", forgery, p.llc([]byte{0xff, 0xff}, plain4[14:])},
		{"S-21 IPv4 in PPPoE", forgery, ether(p.v.mac, p.m.mac, 0x8864, []byte{0x11, 0, 0, 1, 0, 34, 0, 0x21}, plain4[14:])},
		{"S-21 IPv4 in MPLS", forgery, ether(p.v.mac, p.m.mac, 0x8847, []byte{0, 1, 1, 64}, plain4[14:])},
		{"S-21 IPv4 marked as IPv6", forgery, withType(unix.ETH_P_IPV6, plain4)},
		{"S-21 IPv6 marked as IPv4", forgery, withType(unix.ETH_P_IP, udp6(p.v.mac, p.m.mac, p.m.v6, p.v.v6, 1, 2, "x"))},
		{"S-21 IPv4 of version 6", forgery, withByte(plain4, 14, 0x65)},
		{"S-21 IPv4 with a header of 16 bytes", forgery, withByte(plain4, 14, 0x44)},
		{"S-21 IPv4 longer than its frame", forgery, withByte(plain4, 16, 9)},
		{"S-21 IPv4 shorter than its header", forgery, withByte(plain4, 17, 19)},
		{"S-21 IPv6 of version 4", forgery, withByte(p.in6(17, data), 14, 0x40)},
		{"S-23 RARP", forgery, withType(0x8035, arp)},
		{"S-23 QinQ", forgery, slices.Concat(plain4[:12], be(unix.ETH_P_8021AD), be(5), be(unix.ETH_P_8021Q), be(6), plain4[12:])},
		{"S-23 priority tag", forgery, slices.Concat(plain4[:12], be(unix.ETH_P_8021Q), be(7<<13), p.in4(17, 0, nil, data)[12:])},
		{"S-23 802.1X", forgery, ether(p.v.mac, p.m.mac, 0x888e, []byte{2, 1, 0, 0})},
		{"S-23 LACP", forgery, ether(p.v.mac, p.m.mac, 0x8809, []byte{1, 1})},
	}
}

// TestForgedFrames (S-03, S-20, S-21, S-23): antiSpoof drops all disguised forgeries, which otherwise reach the neighbour.
func TestForgedFrames(t *testing.T) {
	l := newLab(t, "name", "forged-frames", "bridge", "btgu", "antiSpoof", true, "isGateway", false, "ipMasq", false)
	l.setBridged("0") // the IP families' rules would reassemble fragments and drop malformed packets
	guarded, other, v := l.add("guarded"), l.other().add("other", "antiSpoof", false), l.other().add("v")
	for _, sender := range []attached{guarded, other} {
		p := pair{sender.station(), v.station()}
		frames := slices.Concat(p.harmlessFrames(), p.forgeries(), p.encapsulatedForgeries())
		for _, g := range routerGuises(p.m) {
			frames = append(frames, frame{"S-23 " + g.what, forgery, slices.Concat(p.v.mac, g.bytes[6:])})
		}
		sender.checkArrivals(v, frames...)
	}
	l.OK(guarded.check())
}
