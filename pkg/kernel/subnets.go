// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Subnet is a range of addresses that a link of the namespace leads to.
type Subnet struct {
	Prefix netip.Prefix
	Link   string
	Via    netip.Addr // the router; zero where the subnet is on the link
}

// String names the subnet as ip(8) does.
func (s Subnet) String() string {
	if s.Via.IsValid() {
		return fmt.Sprintf("%s via %s dev %s", s.Prefix, s.Via, s.Link)
	}
	return fmt.Sprintf("%s dev %s", s.Prefix, s.Link)
}

// Subnets returns the subnets of all addresses, and the unicast routes of the main table. Loopback and link-local addresses, multicast and
// default routes are left out. It reads all links, addresses and routes.
func (n *NS) Subnets() (list []Subnet, err error) {
	names := map[int]string{}
	var addresses []netlink.Addr
	var routes []netlink.Route
	err = retry(func() error {
		links, err := n.h.LinkList()
		if err != nil {
			return fmt.Errorf("link list: %w", err)
		}
		for _, l := range links {
			names[l.Attrs().Index] = l.Attrs().Name
		}
		if addresses, err = n.h.AddrList(nil, netlink.FAMILY_ALL); err != nil {
			return fmt.Errorf("addr show: %w", err)
		}
		routes = nil
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			more, err := n.h.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return fmt.Errorf("route show: %w", err)
			}
			routes = append(routes, more...)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	seen := map[Subnet]bool{}
	add := func(to netip.Prefix, index int, via netip.Addr) {
		s := Subnet{to.Masked(), names[index], via}
		if to.Bits() > 0 && !to.Addr().IsLoopback() && !to.Addr().IsLinkLocalUnicast() && !to.Addr().IsMulticast() && !seen[s] {
			seen[s] = true
			list = append(list, s)
		}
	}
	for _, a := range addresses {
		if p, ok := Prefix(a.IPNet); ok {
			add(p, a.LinkIndex, netip.Addr{})
		}
	}
	for _, r := range routes {
		dst, ok := Prefix(r.Dst)
		if !ok || r.Type != unix.RTN_UNICAST {
			continue
		}
		index, via := r.LinkIndex, router(r.Gw, r.Via)
		if len(r.MultiPath) > 0 { // the first hop stands for all
			index, via = r.MultiPath[0].LinkIndex, router(r.MultiPath[0].Gw, r.MultiPath[0].Via)
		}
		add(dst, index, via)
	}
	return list, nil
}

// router returns the gateway of a route, which may be of the other family (RTA_VIA).
func router(gw net.IP, other netlink.Destination) netip.Addr {
	if via, ok := other.(*netlink.Via); ok {
		gw = via.Addr
	}
	addr, _ := netip.AddrFromSlice(gw)
	return addr.Unmap()
}
