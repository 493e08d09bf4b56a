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
)

// ForgetNeighbour removes what the kernel remembers of the MAC of an address behind a link, when that is not mac. Else it would send to
// a MAC that nobody has any more for up to a minute (neigh/*/base_reachable_time_ms, delay_first_probe_time and ucast_solicit). What an
// admin entered (NUD_PERMANENT) stays.
func (n *NS) ForgetNeighbour(link Link, addr netip.Addr, mac net.HardwareAddr) error {
	entry := &netlink.Neigh{LinkIndex: link.Index, IP: addr.AsSlice()}
	req := n.request(unix.RTM_GETNEIGH, 0)
	req.AddData(&netlink.Ndmsg{Family: uint8(nl.GetIPFamily(entry.IP)), Index: uint32(link.Index)})
	req.AddData(nl.NewRtAttr(unix.NDA_DST, addr.AsSlice()))
	replies, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil || len(replies) == 0 {
		// Kernels before 5.0 cannot tell one entry.
		if err := ignore(err, unix.ENOENT, unix.ENODEV, unix.EOPNOTSUPP, unix.EINVAL); err != nil {
			return fmt.Errorf("neigh get %s dev %s: %w", addr, link.Name, err)
		}
		return nil
	}
	known, err := netlink.NeighDeserialize(replies[0])
	if err != nil {
		return fmt.Errorf("neigh get %s dev %s: %w", addr, link.Name, err)
	}
	if known.State&netlink.NUD_PERMANENT != 0 || bytes.Equal(known.HardwareAddr, mac) {
		return nil
	}
	return change(fmt.Sprintf("neigh del %s dev %s", addr, link.Name), func() error {
		return ignore(n.h.NeighDel(entry), unix.ENOENT, unix.ENODEV)
	})
}
