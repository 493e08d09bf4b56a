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
		for _, index := range hopsOf(r) {
			up[index] = true
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

// InUse returns for each interface why it serves the node itself, or "": it has an address, a route, a master or an interface on top of it.
// Link-local addresses, which each interface that is up has, do not count.
func (n *NS) InUse() (map[string]string, error) {
	links, err := n.allLinks()
	if err != nil {
		return nil, err
	}
	addresses, err := n.listAddresses(nil)
	if err != nil {
		return nil, fmt.Errorf("addr show: %w", err)
	}
	routes, err := n.mainRoutes()
	if err != nil {
		return nil, err
	}
	why, names := map[int]string{}, map[int]string{}
	for _, r := range routes {
		if !isLinkLocal(r.Dst) {
			for _, index := range hopsOf(r) {
				why[index] = "has a route"
			}
		}
	}
	for _, a := range addresses {
		if !isLinkLocal(a.IPNet) {
			why[a.LinkIndex] = "has the address " + a.IPNet.String()
		}
	}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
		if a := l.Attrs(); a.ParentIndex != 0 && a.NetNsID < 0 && l.Type() != "veth" {
			why[a.ParentIndex] = "is the lower interface of " + a.Name
		}
	}
	out := map[string]string{}
	for _, l := range links {
		a := l.Attrs()
		if out[a.Name] = why[a.Index]; a.MasterIndex != 0 {
			out[a.Name] = "is a port of " + names[a.MasterIndex]
		}
	}
	return out, nil
}

func isLinkLocal(n *net.IPNet) bool {
	p, ok := Prefix(n)
	return ok && (p.Addr().IsLinkLocalUnicast() || p.Addr().IsMulticast())
}

// hopsOf returns the interfaces of a route's next hops.
func hopsOf(r netlink.Route) []int {
	list := []int{r.LinkIndex}
	for _, hop := range r.MultiPath {
		list = append(list, hop.LinkIndex)
	}
	return list
}

// isBelow reports whether a link is directly below one of the links in up, as its port or its parent. The kernel reports the peer of a veth
// like a parent, but it does not count. Nor does a parent in another namespace, whose ifindex may be that of a link here.
func isBelow(l netlink.Link, links []netlink.Link, up map[int]bool) bool {
	return up[l.Attrs().MasterIndex] || slices.ContainsFunc(links, func(upper netlink.Link) bool {
		a := upper.Attrs()
		return up[a.Index] && a.ParentIndex == l.Attrs().Index && a.NetNsID < 0 && upper.Type() != "veth"
	})
}
