// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// Match is the route that the kernel selects for an address.
type Match struct {
	Dst       netip.Prefix // destination of the route; length 0 for a default route
	Local     bool         // the namespace has the address
	OnLink    bool         // the route has no gateway
	Connected bool         // the kernel added the route with an address of the link
	links     []int
}

// Through reports whether the route, or one of its next hops, leaves through the link.
func (m Match) Through(link Link) bool { return slices.Contains(m.links, link.Index) }

// FirstLink returns the ifindex of the link through which the route, or its first next hop, leaves.
func (m Match) FirstLink() int {
	if len(m.links) == 0 {
		return 0
	}
	return m.links[0]
}

// MatchRoute returns the route that the kernel selects for an address, in one request however many routes exist. NoRoute is true for the
// error if no usable route matches.
func (n *NS) MatchRoute(addr netip.Addr) (m Match, err error) {
	route, err := n.routeGet(addr, &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil {
		return m, err
	}
	dst, ok := Prefix(route.Dst)
	if !ok {
		dst = netip.PrefixFrom(addr, 0)
	}
	m = Match{Dst: dst.Masked(), Local: route.Type == unix.RTN_LOCAL, Connected: route.Protocol == unix.RTPROT_KERNEL}
	if len(route.MultiPath) == 0 {
		m.OnLink, m.links = !gatewayOf(route.Gw, route.Via).IsValid(), []int{route.LinkIndex}
	}
	for _, hop := range route.MultiPath {
		m.links = append(m.links, hop.LinkIndex)
	}
	return m, nil
}

// HasAddress reports whether the link has the address. It asks for the address's local route, in one request however many addresses exist.
// If several links have the address, only the first of them may count.
func (n *NS) HasAddress(link Link, addr netip.Addr) (bool, error) {
	m, err := n.MatchRoute(addr)
	if NoRoute(err) {
		return false, nil
	}
	return err == nil && m.Local && m.Through(link), err
}

// AddConnected adds the connected route of an address on the link, which the kernel normally adds itself. It is a no-op if the route
// exists.
func (n *NS) AddConnected(link Link, address netip.Prefix) error {
	route := &netlink.Route{LinkIndex: link.Index, Dst: IPNet(address.Masked()), Protocol: unix.RTPROT_KERNEL}
	if address.Addr().Is4() {
		route.Scope, route.Src = netlink.SCOPE_LINK, address.Addr().AsSlice()
	} else {
		route.Priority = 256 // IP6_RT_PRIO_ADDRCONF in include/net/ip6_route.h of the kernel
	}
	return fault.Change(fmt.Sprintf("route add %s dev %s", address.Masked(), link.Name), func() error {
		return fault.Ignore(n.h.RouteAdd(route), unix.EEXIST)
	})
}
