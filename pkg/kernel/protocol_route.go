// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// ProtocolRoute is a route in the main table that refers to a nexthop object.
type ProtocolRoute struct {
	Dst     netip.Prefix
	Nexthop uint32 // 0: the destination is unreachable
	Metric  int    // 0: the kernel's default, which is 0 for IPv4 and 1024 for IPv6
}

const rtaNHID = 30 // RTA_NH_ID of include/uapi/linux/rtnetlink.h, which package netlink lacks

// defaultMetric6 is the kernel's IP6_RT_PRIO_USER (include/net/ip6_route.h).
const defaultMetric6 = 1024

// Explicit returns the route with the kernel's default metric if it is an IPv6 route without one.
func (r ProtocolRoute) Explicit() ProtocolRoute {
	if r.Metric == 0 && r.Dst.Addr().Is6() {
		r.Metric = defaultMetric6
	}
	return r
}

// String formats the route like ip-route(8).
func (r ProtocolRoute) String() string {
	text := r.Dst.String()
	if r.Nexthop == 0 {
		text = "unreachable " + text
	} else {
		text += fmt.Sprintf(" nhid %d", r.Nexthop)
	}
	if r.Metric != 0 {
		text += fmt.Sprintf(" metric %d", r.Metric)
	}
	return text
}

// FoundRoute is an existing route of the main table, whose metric is always explicit.
type FoundRoute struct {
	ProtocolRoute
	Protocol int  // of the program that added it
	Other    bool // not a ProtocolRoute: it has its own gateways or another type
	message  []byte
}

// ProtocolRoutes returns the main table's routes of a protocol, or all if it is 0. The kernel filters, so other routes do not slow it down.
func (n *NS) ProtocolRoutes(protocol int) (list []FoundRoute, err error) {
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		header := nl.NewRtMsg()
		header.Family, header.Protocol, header.Type = family, byte(protocol), unix.RTN_UNSPEC
		replies, err := n.listObjects(unix.RTM_GETROUTE, header)
		if err := fault.Ignore(err, unix.EOPNOTSUPP, unix.EAFNOSUPPORT); err != nil {
			return nil, fmt.Errorf("route show: %w", err)
		}
		for _, message := range replies {
			// Without IPv6, the kernel answers an IPv6 request with routes of other families.
			if r, ok := parseRoute(message); ok && message[0] == family {
				list = append(list, r)
			}
		}
	}
	return list, nil
}

func parseRoute(message []byte) (r FoundRoute, ok bool) {
	if len(message) < unix.SizeofRtMsg {
		return r, false
	}
	header, body := nl.DeserializeRtMsg(message), message[unix.SizeofRtMsg:]
	dst, ok := netip.AddrFromSlice(attributeOf(body, unix.RTA_DST))
	switch {
	case ok:
	case header.Family == unix.AF_INET:
		dst = netip.IPv4Unspecified()
	case header.Family == unix.AF_INET6:
		dst = netip.IPv6Unspecified()
	}
	r.Dst, r.Protocol, r.message = netip.PrefixFrom(dst, int(header.Dst_len)), int(header.Protocol), message
	r.Nexthop, r.Metric = number32(attributeOf(body, rtaNHID)), int(number32(attributeOf(body, unix.RTA_PRIORITY)))
	r.Other = header.Tos != 0 || header.Src_len != 0 || r.Nexthop == 0 && header.Type != unix.RTN_UNREACHABLE ||
		r.Nexthop != 0 && header.Type != unix.RTN_UNICAST
	return r, r.Dst.IsValid()
}

// AddProtocolRoute adds a route. It returns unix.EEXIST if the table has a route with the same prefix and metric, from any program.
func (n *NS) AddProtocolRoute(r ProtocolRoute, protocol int) error {
	return n.setRoute("route add ", r, protocol, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
}

// ReplaceProtocolRoute adds a route, or replaces the first one with its prefix and metric, even another program's, without losing packets.
func (n *NS) ReplaceProtocolRoute(r ProtocolRoute, protocol int) error {
	return n.setRoute("route replace ", r, protocol, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
}

func (n *NS) setRoute(op string, r ProtocolRoute, protocol, flags int) error {
	return fault.Change(op+r.String(), func() error {
		header := nl.NewRtMsg()
		header.Family, header.Dst_len, header.Protocol = familyOf(r.Dst.Addr().Is4()), uint8(r.Dst.Bits()), byte(protocol)
		attributes := []*nl.RtAttr{nl.NewRtAttr(unix.RTA_DST, r.Dst.Addr().AsSlice())}
		if r.Nexthop == 0 {
			header.Type = unix.RTN_UNREACHABLE
		} else {
			attributes = append(attributes, attribute32(rtaNHID, r.Nexthop))
		}
		if r.Metric != 0 {
			attributes = append(attributes, attribute32(unix.RTA_PRIORITY, uint32(r.Metric)))
		}
		return n.sendChange(unix.RTM_NEWROUTE, flags, header, attributes...)
	})
}

// DelProtocolRoute deletes a route by prefix, protocol and metric. It is a no-op if the route is missing.
func (n *NS) DelProtocolRoute(r ProtocolRoute, protocol int) error {
	return fault.Change("route del "+r.String(), func() error {
		header := nl.NewRtDelMsg()
		header.Family, header.Dst_len, header.Protocol = familyOf(r.Dst.Addr().Is4()), uint8(r.Dst.Bits()), byte(protocol)
		err := n.sendChange(unix.RTM_DELROUTE, 0, header, nl.NewRtAttr(unix.RTA_DST, r.Dst.Addr().AsSlice()),
			attribute32(unix.RTA_PRIORITY, uint32(r.Metric)))
		return fault.Ignore(err, unix.ESRCH, unix.ENOENT, unix.ENODEV)
	})
}

// Describe formats a found route like ip-route(8), with link names.
func (n *NS) Describe(r FoundRoute) string {
	header, body := nl.DeserializeRtMsg(r.message), r.message[unix.SizeofRtMsg:]
	text := r.Dst.String()
	if kind := routeTypes()[header.Type]; kind != "" {
		text = kind + " " + text
	}
	if r.Nexthop != 0 {
		text += fmt.Sprintf(" nhid %d", r.Nexthop)
	}
	text += n.describeHop(body, unix.RTA_OIF)
	for hops := attributeOf(body, unix.RTA_MULTIPATH); len(hops) >= unix.SizeofRtNexthop; {
		size := int(binary.NativeEndian.Uint16(hops))
		if size < unix.SizeofRtNexthop || size > len(hops) {
			break
		}
		text += " nexthop" + n.describeHop(hops[unix.SizeofRtNexthop:size], 0) + n.describeLink(binary.NativeEndian.Uint32(hops[4:]))
		hops = hops[min((size+3)&^3, len(hops)):]
	}
	text += " proto " + protocolName(r.Protocol)
	if r.Metric != 0 {
		text += fmt.Sprintf(" metric %d", r.Metric)
	}
	return text
}

func (n *NS) describeHop(body []byte, link uint16) (text string) {
	gateway := attributeOf(body, unix.RTA_GATEWAY)
	if via := attributeOf(body, unix.RTA_VIA); len(via) > 2 { // the family precedes the address
		gateway = via[2:]
	}
	if addr, ok := netip.AddrFromSlice(gateway); ok {
		text = " via " + addr.String()
	}
	return text + n.describeLink(number32(attributeOf(body, link)))
}

func (n *NS) describeLink(index uint32) string {
	if link, ok, err := n.LinkByIndex(int(index)); err == nil && ok {
		return " dev " + link.Name
	}
	return ""
}

func routeTypes() map[uint8]string {
	return map[uint8]string{unix.RTN_LOCAL: "local", unix.RTN_BROADCAST: "broadcast", unix.RTN_ANYCAST: "anycast",
		unix.RTN_MULTICAST: "multicast", unix.RTN_BLACKHOLE: "blackhole", unix.RTN_UNREACHABLE: "unreachable",
		unix.RTN_PROHIBIT: "prohibit", unix.RTN_THROW: "throw"}
}

// protocolName returns the name of a route protocol in iproute2's rt_protos, or its number.
func protocolName(protocol int) string {
	names := map[int]string{unix.RTPROT_REDIRECT: "redirect", unix.RTPROT_KERNEL: "kernel", unix.RTPROT_BOOT: "boot",
		unix.RTPROT_STATIC: "static", unix.RTPROT_RA: "ra", unix.RTPROT_ZEBRA: "zebra", unix.RTPROT_BIRD: "bird", unix.RTPROT_DHCP: "dhcp",
		unix.RTPROT_BABEL: "babel", unix.RTPROT_BGP: "bgp", unix.RTPROT_OSPF: "ospf"}
	if name := names[protocol]; name != "" {
		return name
	}
	return fmt.Sprint(protocol)
}
