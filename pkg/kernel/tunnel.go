// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// TunnelPeer is another node behind a VXLAN device. Frames for MAC, which is that of the other node's device, go to the address Remote.
// Hops are the gateways whose neighbour entries have this MAC.
type TunnelPeer struct {
	MAC    net.HardwareAddr
	Remote netip.Addr
	Hops   []netip.Addr
}

const ndaProtocol = 12 // NDA_PROTOCOL of include/uapi/linux/neighbour.h, which package netlink lacks

// PermanentNeighbours returns the MACs of a link's permanent neighbour entries with the protocol, by address.
func (n *NS) PermanentNeighbours(link Link, protocol int) (macs map[netip.Addr]string, err error) {
	replies, err := n.listObjects(unix.RTM_GETNEIGH, &netlink.Ndmsg{},
		attribute32(unix.NDA_IFINDEX, uint32(link.Index)))
	if err != nil {
		return nil, fmt.Errorf("neigh show dev %s: %w", link.Name, err)
	}
	macs = map[netip.Addr]string{}
	for _, message := range replies {
		e, ok := parseNeighbour(message)
		if ok && e.link == link.Index && e.permanent && e.protocol == protocol && e.addr.IsValid() {
			macs[e.addr] = e.mac.String()
		}
	}
	return macs, nil
}

// SetNeighbour adds a permanent neighbour entry with the protocol, or replaces that of the address.
func (n *NS) SetNeighbour(link Link, addr netip.Addr, mac net.HardwareAddr, protocol int) error {
	return fault.Change(fmt.Sprintf("neigh replace %s lladdr %s dev %s", addr, mac, link.Name), func() error {
		return n.sendChange(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE,
			&netlink.Ndmsg{Family: familyOf(addr.Is4()), Index: uint32(link.Index), State: unix.NUD_PERMANENT},
			nl.NewRtAttr(unix.NDA_DST, addr.AsSlice()), nl.NewRtAttr(unix.NDA_LLADDR, mac),
			nl.NewRtAttr(ndaProtocol, nl.Uint8Attr(uint8(protocol))))
	})
}

// DelNeighbour deletes a neighbour entry. It is a no-op if the entry is missing.
func (n *NS) DelNeighbour(link Link, addr netip.Addr) error {
	return fault.Change(fmt.Sprintf("neigh del %s dev %s", addr, link.Name), func() error {
		return fault.Ignore(n.h.NeighDel(&netlink.Neigh{LinkIndex: link.Index, IP: addr.AsSlice()}), unix.ENOENT, unix.ENODEV)
	})
}

// Forwarding returns the remote addresses of a VXLAN device's forwarding entries by MAC. The kernel stores no protocol for them.
func (n *NS) Forwarding(link Link) (remotes map[string][]netip.Addr, err error) {
	replies, err := n.listObjects(unix.RTM_GETNEIGH, &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(link.Index)})
	if err != nil {
		return nil, fmt.Errorf("fdb show dev %s: %w", link.Name, err)
	}
	remotes = map[string][]netip.Addr{}
	for _, message := range replies {
		if e, ok := parseNeighbour(message); ok && e.link == link.Index && e.family == unix.AF_BRIDGE && len(e.mac) > 0 {
			remotes[e.mac.String()] = append(remotes[e.mac.String()], e.addr)
		}
	}
	return remotes, nil
}

// SetForwarding makes a VXLAN device send frames for a MAC to one remote address, in place of all earlier ones.
func (n *NS) SetForwarding(link Link, mac net.HardwareAddr, remote netip.Addr) error {
	return fault.Change(fmt.Sprintf("fdb replace %s dst %s dev %s", mac, remote, link.Name), func() error {
		return n.sendChange(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, forwardingHeader(link),
			nl.NewRtAttr(unix.NDA_LLADDR, mac), nl.NewRtAttr(unix.NDA_DST, remote.AsSlice()))
	})
}

// DelForwarding deletes a MAC's forwarding entry, if any. Package netlink cannot omit the remote address (NDA_DST).
func (n *NS) DelForwarding(link Link, mac net.HardwareAddr) error {
	return fault.Change(fmt.Sprintf("fdb del %s dev %s", mac, link.Name), func() error {
		err := n.sendChange(unix.RTM_DELNEIGH, 0, forwardingHeader(link), nl.NewRtAttr(unix.NDA_LLADDR, mac))
		return fault.Ignore(err, unix.ENOENT, unix.ENODEV)
	})
}

func forwardingHeader(link Link) *netlink.Ndmsg {
	return &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(link.Index), State: unix.NUD_PERMANENT | unix.NUD_NOARP, Flags: unix.NTF_SELF}
}

type neighbourEntry struct {
	family    byte
	link      int
	permanent bool
	static    bool // of a forwarding database: not learned
	protocol  int
	addr      netip.Addr
	mac       net.HardwareAddr
}

func parseNeighbour(message []byte) (e neighbourEntry, ok bool) {
	const header = 12 // struct ndmsg of include/uapi/linux/neighbour.h
	if len(message) < header {
		return e, false
	}
	e.family, e.link = message[0], int(binary.NativeEndian.Uint32(message[4:]))
	state := binary.NativeEndian.Uint16(message[8:])
	e.permanent, e.static = state&unix.NUD_PERMANENT != 0, state&unix.NUD_NOARP != 0
	e.addr, _ = netip.AddrFromSlice(attributeOf(message[header:], unix.NDA_DST))
	e.mac = attributeOf(message[header:], unix.NDA_LLADDR)
	if p := attributeOf(message[header:], ndaProtocol); len(p) == 1 {
		e.protocol = int(p[0])
	}
	return e, true
}
