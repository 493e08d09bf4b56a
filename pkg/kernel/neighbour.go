// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// Neighbour returns the MAC in the neighbour entry of an address on a link, or nil if there is none or the kernel must still verify it.
func (n *NS) Neighbour(link Link, addr netip.Addr) (net.HardwareAddr, error) {
	known, err := n.neighbourOf(link, addr)
	if err != nil || known == nil || len(known.HardwareAddr) == 0 ||
		known.State&(netlink.NUD_REACHABLE|netlink.NUD_PERMANENT|netlink.NUD_NOARP) == 0 {
		return nil, err
	}
	return known.HardwareAddr, nil
}

// PermanentNeighbour returns the MAC in the permanent neighbour entry of an address on a link, or nil.
func (n *NS) PermanentNeighbour(link Link, addr netip.Addr) (net.HardwareAddr, error) {
	known, err := n.neighbourOf(link, addr)
	if err != nil || known == nil || known.State&netlink.NUD_PERMANENT == 0 {
		return nil, err
	}
	return known.HardwareAddr, nil
}

// neighbourOf returns the neighbour entry of an address, or nil. Linux before 5.0 cannot look up a single entry, so there it always returns
// nil. Package netlink reads only the whole table.
func (n *NS) neighbourOf(link Link, addr netip.Addr) (*netlink.Neigh, error) {
	replies, err := n.send(unix.RTM_GETNEIGH, unix.NLM_F_ACK, &netlink.Ndmsg{Family: familyOf(addr.Is4()), Index: uint32(link.Index)},
		nl.NewRtAttr(unix.NDA_DST, addr.AsSlice()))
	if err := fault.Ignore(err, unix.ENOENT, unix.ENODEV, unix.EOPNOTSUPP, unix.EINVAL); err != nil {
		return nil, fmt.Errorf("neigh get %s dev %s: %w", addr, link.Name, err)
	}
	if err != nil || len(replies) == 0 {
		return nil, nil
	}
	return netlink.NeighDeserialize(replies[0])
}

// ForgetNeighbour removes the neighbour entry of an address on a link if it has another MAC, unless an admin added it (NUD_PERMANENT). With
// a stale entry, the kernel would send to an unused MAC for up to a minute (neigh/*/base_reachable_time_ms, delay_first_probe_time and
// ucast_solicit).
func (n *NS) ForgetNeighbour(link Link, addr netip.Addr, mac net.HardwareAddr) error {
	known, err := n.neighbourOf(link, addr)
	if err != nil || known == nil || known.State&netlink.NUD_PERMANENT != 0 || bytes.Equal(known.HardwareAddr, mac) {
		return err
	}
	return n.DelNeighbour(link, addr)
}
