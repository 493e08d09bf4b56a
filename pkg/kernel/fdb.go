// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// FixedPort returns the ifindex of the port to which a fixed entry of the bridge's forwarding database sends frames for a MAC, or the
// bridge's own ifindex if the node receives them. It returns 0 if the bridge has no entry or has learned it. known is false on Linux before
// 5.0, which cannot look up a single entry. On a bridge that filters VLANs, FixedPort reads the entry of the default VLAN.
func (n *NS) FixedPort(bridge Link, mac net.HardwareAddr) (index int, known bool, err error) {
	attributes := []*nl.RtAttr{nl.NewRtAttr(unix.NDA_LLADDR, mac), attribute32(unix.NDA_MASTER, uint32(bridge.Index))}
	if bridge.FiltersVLANs {
		attributes = append(attributes, nl.NewRtAttr(unix.NDA_VLAN, nl.Uint16Attr(bridge.DefaultVLAN)))
	}
	replies, err := n.send(unix.RTM_GETNEIGH, unix.NLM_F_ACK, &netlink.Ndmsg{Family: unix.AF_BRIDGE}, attributes...)
	switch {
	case errors.Is(err, unix.ENOENT):
		return 0, true, nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("fdb get %s br %s: %w", mac, bridge.Name, err)
	}
	for _, reply := range replies {
		switch e, _ := parseNeighbour(reply); {
		case e.permanent: // also if the MAC is that of a port, as the MAC of a bridge may be
			index = bridge.Index
		case e.static:
			index = e.link
		}
	}
	return index, true, nil
}

// AddOwnEntry adds the MAC of a bridge to its forwarding database, in each VLAN of the bridge. The kernel does that with each new bridge;
// without the entry, the bridge sends frames for the node to its ports.
func (n *NS) AddOwnEntry(bridge Link) error {
	return fault.Change(fmt.Sprintf("fdb add %s dev %s self permanent", bridge.MAC, bridge.Name), func() error {
		return n.sendChange(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE, &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(bridge.Index),
			State: unix.NUD_PERMANENT, Flags: unix.NTF_SELF}, nl.NewRtAttr(unix.NDA_LLADDR, bridge.MAC))
	})
}
