// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Uplinks returns the names of all links with a default route of either family, including backup routes. Uplinks also returns all links
// below these links: the ports of each bond or bridge, and the parent of each VLAN. Uplinks reads all links and the routes of the main
// table.
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

// isBelow reports whether a link is directly below one of the links in the argument "up". A link is below another link in two cases: it is
// a port of the other link, or it is the parent of the other link. The kernel reports the peer of a veth like a parent, but isBelow ignores
// peers of veths. isBelow also ignores a parent in another namespace, because its ifindex may be equal to the ifindex of a link in this
// namespace.
func isBelow(l netlink.Link, links []netlink.Link, up map[int]bool) bool {
	return up[l.Attrs().MasterIndex] || slices.ContainsFunc(links, func(upper netlink.Link) bool {
		a := upper.Attrs()
		return up[a.Index] && a.ParentIndex == l.Attrs().Index && a.NetNsID < 0 && upper.Type() != "veth"
	})
}
