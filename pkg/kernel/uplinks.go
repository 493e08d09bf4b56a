// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Uplinks returns the names of the links through which default routes of both families leave the node, the spare ones as well, and of those below them: the ports of
// a bond or bridge, and what a VLAN is on. It reads all links and the default routes.
func (n *NS) Uplinks() (names []string, err error) {
	up := map[int]bool{}
	var links []netlink.Link
	err = retry(func() error {
		var routes []netlink.Route
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			more, err := n.h.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return fmt.Errorf("route show: %w", err)
			}
			routes = append(routes, more...)
		}
		for _, r := range routes {
			if dst, ok := Prefix(r.Dst); r.Type != unix.RTN_UNICAST || ok && dst.Bits() != 0 {
				continue
			}
			up[r.LinkIndex] = true
			for _, hop := range r.MultiPath {
				up[hop.LinkIndex] = true
			}
		}
		if links, err = n.h.LinkList(); err != nil {
			return fmt.Errorf("link list: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	delete(up, 0)
	for grown := true; grown; {
		grown = false
		for _, l := range links {
			a := l.Attrs()
			// A parent in another namespace may have the same number. The peer of a veth is none.
			below := up[a.MasterIndex] || slices.ContainsFunc(links, func(upper netlink.Link) bool {
				return up[upper.Attrs().Index] && upper.Attrs().ParentIndex == a.Index && upper.Attrs().NetNsID < 0 && upper.Type() != "veth"
			})
			if below && !up[a.Index] {
				up[a.Index], grown = true, true
			}
		}
	}
	for _, l := range links {
		if up[l.Attrs().Index] {
			names = append(names, l.Attrs().Name)
		}
	}
	slices.Sort(names)
	return names, nil
}
