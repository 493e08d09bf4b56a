// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

const (
	sizeofNdMsg = 12
	ndaProtocol = 12
)

func neighbourSchema() schema {
	return schema{
		unix.NDA_DST: omit(), unix.NDA_CACHEINFO: omit(), unix.NDA_PROBES: omit(), unix.NDA_LINK_NETNSID: omit(),
		unix.NDA_LLADDR:  {"lladdr", mac},
		unix.NDA_VLAN:    {"vlan", number},
		unix.NDA_MASTER:  {"master", linkIndex},
		unix.NDA_IFINDEX: {"via", linkIndex},
		ndaProtocol:      {"proto", number},
	}
}

// collectNeighbours collects what a program added: permanent, noarp and proxy entries, except noarp entries for multicast, broadcast and
// loopback, which the kernel adds.
func (c *collector) collectNeighbours(s *socket) error {
	for _, flags := range []byte{0, unix.NTF_PROXY} {
		body := make([]byte, sizeofNdMsg)
		body[10] = flags
		messages, err := s.dump("neighbours", unix.RTM_GETNEIGH, body)
		if err != nil {
			return err
		}
		for _, m := range messages {
			if m[0] == unix.AF_INET || m[0] == unix.AF_INET6 {
				c.addNeighbour(m)
			}
		}
	}
	return nil
}

func (c *collector) addNeighbour(m []byte) {
	list, _ := parseAttrs(m[sizeofNdMsg:])
	state, flags := native.Uint16(m[8:]), m[10]
	link := c.links[native.Uint32(m[4:])]
	proxy := flags&unix.NTF_PROXY != 0
	if !proxy && state&(unix.NUD_PERMANENT|unix.NUD_NOARP) == 0 {
		return
	}
	if !proxy && state&unix.NUD_NOARP != 0 && impliedNeighbour(list, link) {
		return
	}
	c.add(fmt.Sprintf("neighbour %s dev %s state %d flags %d", ip(c, findAttr(list, unix.NDA_DST)), link.name, state, flags),
		c.toFields(list, neighbourSchema())...)
}

func impliedNeighbour(list []attr, l link) bool {
	addr, _ := netip.AddrFromSlice(findAttr(list, unix.NDA_DST))
	hardware := findAttr(list, unix.NDA_LLADDR)
	return l.name == "lo" || addr.IsMulticast() || addr.IsLoopback() || addr.IsUnspecified() ||
		len(hardware) == 0 || hardware[0]&1 != 0
}

// collectBridges collects what only bridges have: static forwarding entries, and the VLANs of ports.
func (c *collector) collectBridges(s *socket) error {
	body := make([]byte, unix.SizeofIfInfomsg) // this dump requires ifinfomsg, not ndmsg
	body[0] = unix.AF_BRIDGE
	messages, err := s.dump("forwarding entries", unix.RTM_GETNEIGH, body)
	if err != nil {
		return err
	}
	for _, m := range messages {
		c.addForwarding(m)
	}
	return c.collectVLANs(s)
}

// addForwarding ignores learned entries, those for the bridge's own MACs, and multicast filters, which change with group membership.
func (c *collector) addForwarding(m []byte) {
	list, _ := parseAttrs(m[sizeofNdMsg:])
	hardware := findAttr(list, unix.NDA_LLADDR)
	link := c.links[native.Uint32(m[4:])]
	if native.Uint16(m[8:])&(unix.NUD_PERMANENT|unix.NUD_NOARP) == 0 || len(hardware) == 0 || hardware[0]&1 != 0 ||
		c.ownMAC(mac(c, hardware)) {
		return
	}
	c.add(fmt.Sprintf("fdb %s dev %s state %d flags %d", mac(c, hardware), link.name, native.Uint16(m[8:]), m[10]),
		c.toFields(list, neighbourSchema())...)
}

func (c *collector) ownMAC(hardware string) bool {
	for _, l := range c.links {
		if l.mac == hardware {
			return true
		}
	}
	return false
}

func (c *collector) collectVLANs(s *socket) error {
	const filterBRVLAN, bridgeVLANInfo = 2, 2
	body := make([]byte, unix.SizeofIfInfomsg)
	body[0] = unix.AF_BRIDGE
	body = appendAttr(body, unix.IFLA_EXT_MASK, native.AppendUint32(nil, filterBRVLAN))
	messages, err := s.dump("bridge VLANs", unix.RTM_GETLINK, body)
	if err != nil {
		return err
	}
	for _, m := range messages {
		list, _ := parseAttrs(m[unix.SizeofIfInfomsg:])
		for _, a := range nestedAttrs(list, unix.IFLA_AF_SPEC) {
			if a.typ == bridgeVLANInfo && len(a.data) == 4 {
				c.add(fmt.Sprintf("vlan %d dev %s flags %d", native.Uint16(a.data[2:]),
					c.linkName(native.Uint32(m[4:])), native.Uint16(a.data)))
			}
		}
	}
	return nil
}
