// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Uplinks returns the names of all links with a default route of either family, including backup routes, and of the links below them: the
// ports of a bond or bridge, and the parent of a VLAN. It reads all links and the routes of the main table.
func (n *NS) Uplinks() (names []string, err error) {
	routes, err := n.mainRoutes()
	if err != nil {
		return nil, err
	}
	links, err := n.allLinks()
	if err != nil {
		return nil, err
	}
	up := map[int]bool{}
	for _, r := range routes {
		if dst, ok := Prefix(r.Dst); r.Type != unix.RTN_UNICAST || ok && dst.Bits() != 0 {
			continue
		}
		up[r.LinkIndex] = true
		for _, hop := range r.MultiPath {
			up[hop.LinkIndex] = true
		}
	}
	delete(up, 0)
	for grown := true; grown; {
		grown = false
		for _, l := range links {
			if index := l.Attrs().Index; !up[index] && isBelow(l, links, up) {
				up[index], grown = true, true
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

// isBelow reports whether a link is directly below one of the links in up, as its port or its parent. The kernel reports the peer of a veth
// like a parent, but it does not count. Nor does a parent in another namespace, whose ifindex may be that of a link here.
func isBelow(l netlink.Link, links []netlink.Link, up map[int]bool) bool {
	return up[l.Attrs().MasterIndex] || slices.ContainsFunc(links, func(upper netlink.Link) bool {
		a := upper.Attrs()
		return up[a.Index] && a.ParentIndex == l.Attrs().Index && a.NetNsID < 0 && upper.Type() != "veth"
	})
}
