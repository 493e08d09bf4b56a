// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	sizeofRtMsg     = 12
	sizeofRtNexthop = 8
	sizeofNhMsg     = 8
	rtmGetNexthop   = 106
)

func routeTypes() map[byte]string {
	return map[byte]string{
		unix.RTN_UNICAST: "unicast", unix.RTN_LOCAL: "local", unix.RTN_BROADCAST: "broadcast", unix.RTN_ANYCAST: "anycast",
		unix.RTN_MULTICAST: "multicast", unix.RTN_BLACKHOLE: "blackhole", unix.RTN_UNREACHABLE: "unreachable",
		unix.RTN_PROHIBIT: "prohibit", unix.RTN_THROW: "throw",
	}
}

func routeSchema() schema {
	return schema{
		unix.RTA_DST: omit(), unix.RTA_TABLE: omit(), unix.RTA_CACHEINFO: omit(), 23 /* EXPIRES */ : omit(), unix.RTA_PAD: omit(),
		unix.RTA_SRC:       {"from", ip},
		unix.RTA_IIF:       {"iif", linkIndex},
		unix.RTA_OIF:       {"dev", linkIndex},
		unix.RTA_GATEWAY:   {"via", ip},
		unix.RTA_PRIORITY:  {"metric", number},
		unix.RTA_PREFSRC:   {"src", ip},
		unix.RTA_METRICS:   {"metrics", treeColumn},
		unix.RTA_MULTIPATH: {"nexthops", nexthopsText},
		unix.RTA_VIA:       {"via", raw},
		unix.RTA_PREF:      {"pref", number},
		30:                 {"nhid", number},
	}
}

func (c *collector) collectRoutes(s *socket) error {
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		body := make([]byte, sizeofRtMsg)
		body[0] = family
		messages, err := s.dump("routes", unix.RTM_GETROUTE, body)
		if err != nil {
			return err
		}
		for _, m := range messages {
			c.addRoute(m)
		}
	}
	return nil
}

func (c *collector) addRoute(m []byte) {
	list, _ := parseAttrs(m[sizeofRtMsg:])
	protocol, scope, kind, flags := m[5], m[6], m[7], native.Uint32(m[8:])
	if flags&unix.RTM_F_CLONED != 0 || derivedRoute(m, list) {
		return
	}
	table := m[4:5]
	if t := findAttr(list, unix.RTA_TABLE); t != nil {
		table = t
	}
	name := fmt.Sprintf("route %s %s table %s %s proto %d scope %d", orUnknown(routeTypes()[kind]),
		prefixText(findAttr(list, unix.RTA_DST), m[0], m[1]), tableText(table), joinFields(c.toFields(list, routeSchema())), protocol, scope)
	if m[3] != 0 {
		name += fmt.Sprintf(" tos %d", m[3])
	}
	if flags&unix.RTNH_F_ONLINK != 0 {
		name += " onlink"
	}
	c.add(name)
}

// derivedRoute reports whether the kernel added the route for an address or interface, which for IPv6 happens some time after the address.
func derivedRoute(m []byte, list []attr) bool {
	if m[5] != unix.RTPROT_KERNEL {
		return false
	}
	switch m[7] {
	case unix.RTN_LOCAL, unix.RTN_BROADCAST, unix.RTN_ANYCAST, unix.RTN_MULTICAST:
		return true
	}
	addr, ok := netip.AddrFromSlice(findAttr(list, unix.RTA_DST))
	return ok && addr.Is6() && (addr.IsLinkLocalUnicast() || addr.IsMulticast())
}

func prefixText(addr []byte, family, bits byte) string {
	if addr == nil {
		addr = make([]byte, 4)
		if family == unix.AF_INET6 {
			addr = make([]byte, 16)
		}
	}
	return fmt.Sprintf("%s/%d", ip(nil, addr), bits)
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

// nexthopsText formats the nexthops of one route without what changes with the carrier.
func nexthopsText(c *collector, b []byte) string {
	var hops []string
	for len(b) >= sizeofRtNexthop {
		size := int(native.Uint16(b))
		if size < sizeofRtNexthop || size > len(b) {
			break
		}
		list, _ := parseAttrs(b[sizeofRtNexthop:size])
		hop := fmt.Sprintf("[dev %s weight %d %s", c.linkName(native.Uint32(b[4:])), b[3], joinFields(c.toFields(list, routeSchema())))
		if b[2]&unix.RTNH_F_ONLINK != 0 {
			hop += " onlink"
		}
		hops = append(hops, hop+"]")
		b = b[min(align(size), len(b)):]
	}
	return strings.Join(hops, " ")
}

func ruleSchema() schema {
	return schema{
		unix.FRA_DST: omit(), unix.FRA_SRC: omit(), unix.FRA_TABLE: omit(), unix.FRA_PAD: omit(),
		unix.FRA_IIFNAME:            {"iif", str},
		unix.FRA_OIFNAME:            {"oif", str},
		unix.FRA_PRIORITY:           omit(),
		unix.FRA_FWMARK:             {"fwmark", number},
		unix.FRA_FWMASK:             {"fwmask", number},
		unix.FRA_GOTO:               {"goto", number},
		unix.FRA_PROTOCOL:           {"proto", number},
		unix.FRA_L3MDEV:             {"l3mdev", number},
		unix.FRA_SUPPRESS_PREFIXLEN: {"suppress_prefixlength", unlessUnset},
	}
}

func (c *collector) collectRules(s *socket) error {
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		body := make([]byte, sizeofRtMsg)
		body[0] = family
		messages, err := s.dump("rules", unix.RTM_GETRULE, body)
		if err != nil {
			return err
		}
		for _, m := range messages {
			list, _ := parseAttrs(m[sizeofRtMsg:])
			c.add(fmt.Sprintf("rule %s: from %s to %s table %s action %d tos %d flags %d %s",
				orZero(number(c, findAttr(list, unix.FRA_PRIORITY))),
				prefixText(findAttr(list, unix.FRA_SRC), m[0], m[2]), prefixText(findAttr(list, unix.FRA_DST), m[0], m[1]),
				tableText(findAttr(list, unix.FRA_TABLE)), m[7], m[3], native.Uint32(m[8:]), joinFields(c.toFields(list, ruleSchema()))))
		}
	}
	return nil
}

// unlessUnset formats a number, or returns "" for -1, which means that none is set.
func unlessUnset(c *collector, b []byte) string {
	if len(b) == 4 && native.Uint32(b) == ^uint32(0) {
		return ""
	}
	return number(c, b)
}

// tableText returns the name of a standard routing table, or else its number.
func tableText(b []byte) string {
	switch text := number(nil, b); text {
	case "255":
		return "local"
	case "254":
		return "main"
	case "253":
		return "default"
	default:
		return text
	}
}

func orZero(s string) string {
	if s == "" {
		return "0"
	}
	return s
}

func (c *collector) collectNexthops(s *socket) error {
	messages, err := s.dump("nexthops", rtmGetNexthop, make([]byte, sizeofNhMsg))
	if err != nil {
		return err
	}
	by := schema{1: {"id", number}, 5: {"dev", linkIndex}, 6: {"via", ip}}
	for _, m := range messages {
		list, _ := parseAttrs(m[sizeofNhMsg:])
		c.add(fmt.Sprintf("nexthop %s proto %d", joinFields(c.toFields(list, by)), m[2]))
	}
	return nil
}
