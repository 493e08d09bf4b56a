// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net"
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

// InUse returns for each interface why it may serve the node itself, or "": it is up, and so may get an address at any time, it has one, or
// another interface lies above it.
func (n *NS) InUse() (map[string]string, error) {
	links, err := n.allLinks()
	if err != nil {
		return nil, err
	}
	addresses, err := n.listAddresses(nil)
	if err != nil {
		return nil, fmt.Errorf("addr show: %w", err)
	}
	above, has := map[int]string{}, map[int]string{}
	for _, l := range links {
		if a := l.Attrs(); a.ParentIndex != 0 && a.NetNsID < 0 && l.Type() != "veth" {
			above[a.ParentIndex] = a.Name
		}
	}
	for _, a := range addresses {
		has[a.LinkIndex] = a.IPNet.String()
	}
	out := map[string]string{}
	for _, l := range links {
		switch a := l.Attrs(); {
		case above[a.Index] != "":
			out[a.Name] = "is the lower interface of " + above[a.Index]
		case a.MasterIndex != 0:
			out[a.Name] = "is a port of another interface"
		case a.Flags&net.FlagUp != 0:
			out[a.Name] = "is up"
		case has[a.Index] != "":
			out[a.Name] = "has the address " + has[a.Index]
		}
	}
	return out, nil
}

// isBelow reports whether a link is directly below one of the links in up, as its port or its parent. The kernel reports the peer of a veth
// like a parent, but it does not count. Nor does a parent in another namespace, whose ifindex may be that of a link here.
func isBelow(l netlink.Link, links []netlink.Link, up map[int]bool) bool {
	return up[l.Attrs().MasterIndex] || slices.ContainsFunc(links, func(upper netlink.Link) bool {
		a := upper.Attrs()
		return up[a.Index] && a.ParentIndex == l.Attrs().Index && a.NetNsID < 0 && upper.Type() != "veth"
	})
}
