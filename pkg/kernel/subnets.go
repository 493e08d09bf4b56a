// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Subnet is a range of addresses that the namespace reaches through one link.
type Subnet struct {
	Prefix netip.Prefix
	Link   string
	Via    netip.Addr // router; zero for an on-link subnet
}

// String formats the subnet like a route in ip-route(8).
func (s Subnet) String() string {
	if s.Via.IsValid() {
		return fmt.Sprintf("%s via %s dev %s", s.Prefix, s.Via, s.Link)
	}
	return fmt.Sprintf("%s dev %s", s.Prefix, s.Link)
}

// Subnets returns the subnets of all addresses and the destinations of all unicast routes in the main table, without default routes and
// loopback, link-local and multicast subnets. It reads all links, addresses and routes.
func (n *NS) Subnets() (list []Subnet, err error) {
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
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, a := range addresses {
		if p, ok := Prefix(a.IPNet); ok {
			list = append(list, Subnet{p.Masked(), names[a.LinkIndex], netip.Addr{}})
		}
	}
	for _, r := range routes {
		dst, ok := Prefix(r.Dst)
		if !ok || r.Type != unix.RTN_UNICAST {
			continue
		}
		index, via := r.LinkIndex, gatewayOf(r.Gw, r.Via)
		if len(r.MultiPath) > 0 { // the first hop stands for all
			index, via = r.MultiPath[0].LinkIndex, gatewayOf(r.MultiPath[0].Gw, r.MultiPath[0].Via)
		}
		list = append(list, Subnet{dst.Masked(), names[index], via})
	}
	seen := map[Subnet]bool{}
	return slices.DeleteFunc(list, func(s Subnet) bool {
		again, to := seen[s], s.Prefix.Addr()
		seen[s] = true
		return again || s.Prefix.Bits() == 0 || to.IsLoopback() || to.IsLinkLocalUnicast() || to.IsMulticast()
	}), nil
}

// AddressSubnets returns the subnets of all addresses, except loopback and link-local ones, in one request.
func (n *NS) AddressSubnets() (list []netip.Prefix, err error) {
	addresses, err := n.listAddresses(nil)
	for _, a := range addresses {
		if p, ok := Prefix(a.IPNet); ok && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			list = append(list, p.Masked())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("addr show: %w", err)
	}
	return list, nil
}

func (n *NS) allLinks() ([]netlink.Link, error) {
	links, err := dump(n.h.LinkList)
	return links, wrapped("link show", err)
}

func (n *NS) mainRoutes() (routes []netlink.Route, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		more, err := n.listRoutes(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, err
		}
		routes = append(routes, more...)
	}
	return routes, nil
}

// gatewayOf returns the gateway of a route, which may be an IPv6 address for IPv4 (RTA_VIA).
func gatewayOf(gw net.IP, other netlink.Destination) netip.Addr {
	if via, ok := other.(*netlink.Via); ok {
		gw = via.Addr
	}
	addr, _ := netip.AddrFromSlice(gw)
	return addr.Unmap()
}
