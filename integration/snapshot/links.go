// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// link has the properties of an interface that describe other objects, such as addresses and routes.
type link struct {
	name string
	mac  string
	kind string
}

// Some versions of x/sys/unix lack these attributes of RTM_NEWLINK.
const (
	iflaInfoKind      = 1
	iflaInfoData      = 2
	iflaInfoXstats    = 3
	iflaInfoSlaveKind = 4
	iflaInfoSlaveData = 5
	iflaInet6Token    = 7
	iflaInet6GenMode  = 8
	filterVF          = 1 // RTEXT_FILTER_VF
	filterSkipStats   = 8 // RTEXT_FILTER_SKIP_STATS
)

// flagNames returns the names of link flags that an admin sets, without those that change with the carrier.
func flagNames() map[uint32]string {
	return map[uint32]string{
		unix.IFF_UP: "up", unix.IFF_PROMISC: "promisc", unix.IFF_ALLMULTI: "allmulti", unix.IFF_NOARP: "noarp",
		unix.IFF_BROADCAST: "broadcast", unix.IFF_MULTICAST: "multicast", unix.IFF_POINTOPOINT: "pointopoint",
		unix.IFF_LOOPBACK: "loopback", unix.IFF_MASTER: "master", unix.IFF_SLAVE: "slave", unix.IFF_DYNAMIC: "dynamic",
	}
}

func names(bits uint32, of map[uint32]string) string {
	var out []string
	for bit := uint32(1); bit != 0; bit <<= 1 {
		if bits&bit != 0 && of[bit] != "" {
			out = append(out, of[bit])
		}
	}
	return strings.Join(out, ",")
}

// linkSchema leaves out indexes, counters, limits of the driver, all that changes with the carrier, and sysctls, which are read from /proc.
func linkSchema() schema {
	s := schema{
		unix.IFLA_ADDRESS:     {"mac", mac},
		unix.IFLA_MTU:         {"mtu", number},
		unix.IFLA_MASTER:      {"master", linkIndex},
		unix.IFLA_TXQLEN:      {"txqlen", number},
		unix.IFLA_LINKMODE:    {"linkmode", nonZero},
		unix.IFLA_LINKINFO:    {"linkinfo", linkInfo},
		unix.IFLA_IFALIAS:     {"alias", str},
		unix.IFLA_NUM_VF:      {"vfs", nonZero},
		unix.IFLA_VFINFO_LIST: {"vf", treeColumn},
		unix.IFLA_AF_SPEC:     {"inet6", inet6Spec},
		unix.IFLA_GROUP:       {"group", nonZero},
		unix.IFLA_PROMISCUITY: {"promiscuity", nonZero},
		unix.IFLA_PROTO_DOWN:  {"protodown", nonZero},
		unix.IFLA_ALLMULTI:    {"allmulti", nonZero},
		unix.IFLA_XDP:         {"xdp", xdp},
		unix.IFLA_PROP_LIST:   {"altnames", treeColumn},

		unix.IFLA_NUM_TX_QUEUES:     {"txqueues", number},
		unix.IFLA_NUM_RX_QUEUES:     {"rxqueues", number},
		unix.IFLA_GSO_MAX_SEGS:      {"gso_max_segs", number},
		unix.IFLA_GSO_MAX_SIZE:      {"gso_max_size", number},
		unix.IFLA_GRO_MAX_SIZE:      {"gro_max_size", number},
		unix.IFLA_GSO_IPV4_MAX_SIZE: {"gso_ipv4_max_size", number},
		unix.IFLA_GRO_IPV4_MAX_SIZE: {"gro_ipv4_max_size", number},
	}
	for _, typ := range []uint16{
		unix.IFLA_BROADCAST, unix.IFLA_IFNAME, unix.IFLA_LINK, unix.IFLA_QDISC, unix.IFLA_STATS, unix.IFLA_MAP,
		unix.IFLA_OPERSTATE, unix.IFLA_STATS64, unix.IFLA_CARRIER, unix.IFLA_CARRIER_CHANGES, unix.IFLA_LINK_NETNSID,
		unix.IFLA_PAD, unix.IFLA_EVENT, unix.IFLA_CARRIER_UP_COUNT, unix.IFLA_CARRIER_DOWN_COUNT, unix.IFLA_MIN_MTU,
		unix.IFLA_MAX_MTU, unix.IFLA_TSO_MAX_SIZE, unix.IFLA_TSO_MAX_SEGS, unix.IFLA_DEVLINK_PORT,
		65 /* DPLL_PIN */, 66 /* MAX_PACING_OFFLOAD_HORIZON */, 67 /* NETNS_IMMUTABLE */, 68 /* HEADROOM */, 69, /* TAILROOM */
	} {
		s[typ] = omit()
	}
	return s
}

func (c *collector) collectLinks(s *socket) error {
	body := make([]byte, unix.SizeofIfInfomsg, unix.SizeofIfInfomsg+8)
	body = appendAttr(body, unix.IFLA_EXT_MASK, native.AppendUint32(nil, filterVF|filterSkipStats))
	messages, err := s.dump("links", unix.RTM_GETLINK, body)
	if err != nil {
		return err
	}
	c.links = map[uint32]link{}
	for _, m := range messages {
		list, _ := parseAttrs(m[unix.SizeofIfInfomsg:])
		c.links[native.Uint32(m[4:])] = link{
			name: str(c, findAttr(list, unix.IFLA_IFNAME)),
			mac:  mac(c, findAttr(list, unix.IFLA_ADDRESS)),
			kind: str(c, findAttr(nestedAttrs(list, unix.IFLA_LINKINFO), iflaInfoKind)),
		}
	}
	by := linkSchema()
	for _, m := range messages {
		c.addLink(m, by)
	}
	return nil
}

func (c *collector) addLink(m []byte, by schema) {
	list, _ := parseAttrs(m[unix.SizeofIfInfomsg:])
	fields := c.toFields(list, by)
	fields = append(fields,
		field{"flags", names(native.Uint32(m[8:]), flagNames())},
		field{"type", number(c, m[2:4])})
	if lower := findAttr(list, unix.IFLA_LINK); len(lower) == 4 && findAttr(list, unix.IFLA_LINK_NETNSID) == nil {
		fields = append(fields, field{"lower", linkIndex(c, lower)})
	} else if lower != nil {
		fields = append(fields, field{"lower", "in another namespace"})
	}
	c.add("link "+c.linkName(native.Uint32(m[4:])), fields...)
}

// linkInfo formats kind and settings of a link and of its master.
func linkInfo(c *collector, b []byte) string {
	list, _ := parseAttrs(b)
	bySettings := func(kind uint16, settings schema) func(*collector, []byte) string {
		if str(c, findAttr(list, kind)) == "bridge" {
			return schemaColumn(settings)
		}
		return treeColumn
	}
	return joinFields(c.toFields(list, schema{
		iflaInfoKind:      {"kind", str},
		iflaInfoData:      {"settings", bySettings(iflaInfoKind, bridgeSchema())},
		iflaInfoXstats:    omit(),
		iflaInfoSlaveKind: {"port of", str},
		iflaInfoSlaveData: {"port", bySettings(iflaInfoSlaveKind, bridgePortSchema())},
	}))
}

// bridgeSchema leaves out timers, counters and the state of the spanning tree.
func bridgeSchema() schema {
	s := schema{}
	for typ := uint16(1); typ <= 60; typ++ {
		s[typ] = column{fmt.Sprintf("br%d", typ), number}
	}
	for name, typ := range map[string]uint16{
		"forward_delay": 1, "hello_time": 2, "max_age": 3, "ageing_time": 4, "stp": 5, "priority": 6, "vlan_filtering": 7,
		"group_fwd_mask": 9, "mcast_router": 22, "mcast_snooping": 23, "mcast_querier": 25, "nf_call_iptables": 36,
		"nf_call_ip6tables": 37, "nf_call_arptables": 38, "vlan_default_pvid": 39,
	} {
		s[typ] = column{name, number}
	}
	for _, typ := range []uint16{10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 40, 47, 48} {
		s[typ] = omit()
	}
	return s
}

// bridgePortSchema leaves out the port's number, state, timers, counters and cost, which changes with the carrier.
func bridgePortSchema() schema {
	s := schema{}
	for typ := uint16(1); typ <= 60; typ++ {
		s[typ] = column{fmt.Sprintf("port%d", typ), number}
	}
	for name, typ := range map[string]uint16{
		"priority": 2, "hairpin": 4, "guard": 5, "root_block": 6, "fastleave": 7, "learning": 8, "flood": 9, "proxy_arp": 10,
		"mcast_flood": 27, "mcast_to_unicast": 28, "vlan_tunnel": 29, "bcast_flood": 30, "neigh_suppress": 32,
		"isolated": 33, "locked": 39, "mab": 40,
	} {
		s[typ] = column{name, number}
	}
	for _, typ := range []uint16{1, 3, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 38, 41} {
		s[typ] = omit()
	}
	return s
}

// inet6Spec formats the IPv6 settings of an interface that have no sysctl: token and address generation mode.
func inet6Spec(c *collector, b []byte) string {
	families, _ := parseAttrs(b)
	list := nestedAttrs(families, unix.AF_INET6)
	token, mode := findAttr(list, iflaInet6Token), findAttr(list, iflaInet6GenMode)
	if token == nil && mode == nil {
		return ""
	}
	return "token " + ip(c, token) + " addrgenmode " + number(c, mode)
}

func xdp(c *collector, b []byte) string {
	const attached = 2
	list, _ := parseAttrs(b)
	return nonZero(c, findAttr(list, attached))
}

func appendAttr(b []byte, typ uint16, data []byte) []byte {
	b = native.AppendUint16(b, uint16(unix.SizeofRtAttr+len(data)))
	b = native.AppendUint16(b, typ)
	b = append(b, data...)
	return append(b, make([]byte, align(len(data))-len(data))...)
}
