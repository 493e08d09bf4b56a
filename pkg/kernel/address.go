// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// IPNet converts a prefix to the type of CNI results and package netlink. The host bits stay.
func IPNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Prefix converts an IPNet to a prefix. It returns false if the address or mask is invalid.
func Prefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	if addr = addr.Unmap(); addr.Is4() && bits == 128 {
		ones -= 96
	}
	p := netip.PrefixFrom(addr, ones)
	return p, p.IsValid()
}

// AddHostAddress adds an address with prefix length 32 or 128. For IPv6, the kernel adds only the local route, and no prefix route
// (IFA_F_NOPREFIXROUTE). It returns unix.EEXIST if the link has the address.
func (n *NS) AddHostAddress(link Link, a netip.Addr) error {
	p := netip.PrefixFrom(a, a.BitLen())
	addr := &netlink.Addr{IPNet: IPNet(p), Flags: unix.IFA_F_NOPREFIXROUTE}
	if a.Is6() {
		addr.Flags |= unix.IFA_F_NODAD
	}
	op := fmt.Sprintf("addr add %s dev %s noprefixroute", p, link.Name)
	return fault.Change(op, func() error { return n.h.AddrAdd(byIndex(link.Index), addr) })
}

// AddAddress adds an address with its prefix length. Unless dad is set, an IPv6 address is usable at once, without duplicate address
// detection (IFA_F_NODAD). It returns unix.EEXIST if the link has the address.
func (n *NS) AddAddress(link Link, p netip.Prefix, dad bool) error {
	addr := &netlink.Addr{IPNet: IPNet(p)}
	if p.Addr().Is6() && !dad {
		addr.Flags = unix.IFA_F_NODAD
	}
	return fault.Change(fmt.Sprintf("addr add %s dev %s", p, link.Name), func() error { return n.h.AddrAdd(byIndex(link.Index), addr) })
}

// DelAddress removes an address. It is a no-op if the address is missing.
func (n *NS) DelAddress(link Link, p netip.Prefix) error {
	return fault.Change(fmt.Sprintf("addr del %s dev %s", p, link.Name), func() error {
		return fault.Ignore(n.h.AddrDel(byIndex(link.Index), &netlink.Addr{IPNet: IPNet(p)}), unix.EADDRNOTAVAIL, unix.ENODEV)
	})
}

// listAddresses returns the addresses of a link, or of all links if of is nil.
func (n *NS) listAddresses(of netlink.Link) ([]netlink.Addr, error) {
	return dump(func() ([]netlink.Addr, error) { return n.h.AddrList(of, netlink.FAMILY_ALL) })
}

// Addresses returns the addresses of a link with their prefix lengths, except link-local addresses.
func (n *NS) Addresses(link Link) ([]netip.Prefix, error) {
	list, err := n.listAddresses(byIndex(link.Index))
	if err != nil {
		return nil, fmt.Errorf("addr show dev %s: %w", link.Name, err)
	}
	var out []netip.Prefix
	for _, a := range list {
		if p, ok := Prefix(a.IPNet); ok && !p.Addr().IsLinkLocalUnicast() {
			out = append(out, p)
		}
	}
	return out, nil
}

// WaitForDAD waits until duplicate address detection has finished for all IPv6 addresses of the link. It returns an error if another node
// uses one of them, or after the time most.
func (n *NS) WaitForDAD(link Link, most time.Duration) error {
	for deadline := time.Now().Add(most); ; time.Sleep(20 * time.Millisecond) {
		list, err := n.h.AddrList(byIndex(link.Index), netlink.FAMILY_V6)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("addr show dev %s: %w", link.Name, err)
		}
		tentative := false
		for _, a := range list {
			if a.Flags&unix.IFA_F_DADFAILED != 0 {
				return fmt.Errorf("address %s on %s is used by another node", a.IP, link.Name)
			}
			tentative = tentative || a.Flags&unix.IFA_F_TENTATIVE != 0
		}
		if !tentative && err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("duplicate address detection on %s: not done after %v", link.Name, most)
		}
	}
}

// AwaitAddress waits until the namespace answers neighbour solicitations for an address, or returns an error at the deadline. For a new
// IPv6 address, a kernel work queue joins the solicited-node group and adds the local route later (addrconf_dad_work in
// net/ipv6/addrconf.c). A solicitation that arrives before gets no answer, and the neighbour repeats it only after a second.
func (n *NS) AwaitAddress(addr netip.Addr, deadline time.Time) error {
	if addr.Is4() {
		return nil // IPv4: the route exists at once, and ARP requests are broadcast
	}
	for {
		if own, _ := n.IsOwn(addr); own {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("address %s: the kernel has not added its local route yet", addr)
		}
		time.Sleep(pollPause)
	}
}

// Route is a route whose packets leave through one link.
type Route struct {
	Dst      netip.Prefix `json:"dst"`
	Gateway  netip.Addr   `json:"gateway,omitzero"` // zero for an on-link destination
	MTU      int          `json:"mtu,omitempty"`
	AdvMSS   int          `json:"advmss,omitempty"`
	Priority int          `json:"priority,omitempty"`
	Table    *int         `json:"table,omitempty"`
	Scope    *int         `json:"scope,omitempty"`
}

func (r Route) netlink(index int) *netlink.Route {
	nr := &netlink.Route{LinkIndex: index, Dst: IPNet(r.Dst.Masked()), MTU: r.MTU, AdvMSS: r.AdvMSS, Priority: r.Priority}
	if r.Gateway.IsValid() {
		nr.Gw = r.Gateway.AsSlice()
	} else {
		nr.Scope = netlink.SCOPE_LINK
	}
	if r.Table != nil {
		nr.Table = *r.Table
	}
	if r.Scope != nil {
		nr.Scope = netlink.Scope(*r.Scope)
	}
	return nr
}

// AddRoute adds a route through link. A second gateway for the same destination makes a multipath route (ECMP).
func (n *NS) AddRoute(link Link, r Route) error {
	op := fmt.Sprintf("route add %s dev %s", r.Dst, link.Name)
	if r.Gateway.IsValid() {
		op = fmt.Sprintf("route add %s via %s dev %s", r.Dst, r.Gateway, link.Name)
	}
	return fault.Change(op, func() error { return n.h.RouteAddEcmp(r.netlink(link.Index)) })
}

// HasRoute reports whether the link has a route with the destination, gateway, table and priority of r.
func (n *NS) HasRoute(link Link, r Route) (bool, error) {
	filter := r.netlink(link.Index)
	if filter.Table == 0 {
		filter.Table = unix.RT_TABLE_MAIN
	}
	list, err := n.listRoutes(int(familyOf(r.Dst.Addr().Is4())), filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	if err != nil {
		return false, err
	}
	for _, got := range list {
		if routeMatches(got, link.Index, r) {
			return true, nil
		}
	}
	return false, nil
}

// listRoutes returns the routes of an address family that have those properties of the filter which the mask selects.
func (n *NS) listRoutes(family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error) {
	list, err := dump(func() ([]netlink.Route, error) { return n.h.RouteListFiltered(family, filter, mask) })
	return list, wrapped("route show", err)
}

func routeMatches(got netlink.Route, index int, want Route) bool {
	if want.Priority != 0 && got.Priority != want.Priority {
		return false
	}
	if want.MTU != 0 && got.MTU != want.MTU || want.AdvMSS != 0 && got.AdvMSS != want.AdvMSS {
		return false
	}
	hops := []*netlink.NexthopInfo{{LinkIndex: got.LinkIndex, Gw: got.Gw}}
	if len(got.MultiPath) > 0 {
		hops = got.MultiPath
	}
	for _, hop := range hops {
		gw, _ := netip.AddrFromSlice(hop.Gw)
		if hop.LinkIndex == index && (!want.Gateway.IsValid() || gw.Unmap() == want.Gateway) {
			return true
		}
	}
	return false
}

// RouteTo returns the ifindex of the link through which packets to an address leave. NoRoute is true for the error if there is no route.
func (n *NS) RouteTo(addr netip.Addr) (int, error) {
	route, err := n.routeGet(addr, nil)
	return route.LinkIndex, err
}

// CanForward returns an error if the kernel would not forward a packet that arrives on a link. NoRoute is true for it if no route matches,
// or if the matching route or rule refuses packets. It is EXDEV if the reverse path filter drops the packet.
func (n *NS) CanForward(in Link, from, to netip.Addr) error {
	_, err := n.h.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{IifIndex: in.Index, SrcAddr: from.AsSlice()})
	return wrapped(fmt.Sprintf("route get %s from %s iif %s", to, from, in.Name), err)
}

// NoRoute reports whether an error of RouteTo or CanForward means that the address has no usable route. Routes that refuse packets
// (unreachable, prohibit, blackhole) are not usable.
func NoRoute(err error) bool {
	return errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINVAL)
}

func (n *NS) routeGet(addr netip.Addr, options *netlink.RouteGetOptions) (netlink.Route, error) {
	routes, err := dump(func() ([]netlink.Route, error) { return n.h.RouteGetWithOptions(addr.AsSlice(), options) })
	if err == nil && len(routes) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		return netlink.Route{}, fmt.Errorf("route get %s: %w", addr, err)
	}
	return routes[0], nil
}

// IsOwn reports whether an address is assigned in the namespace, and whether it is the broadcast address of a connected subnet.
func (n *NS) IsOwn(addr netip.Addr) (own, broadcast bool) {
	route, err := n.routeGet(addr, nil)
	return err == nil && route.Type == unix.RTN_LOCAL, err == nil && route.Type == unix.RTN_BROADCAST
}

// documentationV4 is a documentation address (RFC 5737), which normally only the default route matches.
const documentationV4 = "198.51.100.1"

// IsUplink reports whether the default route uses the link.
func (n *NS) IsUplink(link Link) bool {
	index, err := n.RouteTo(netip.MustParseAddr(documentationV4))
	return err == nil && index == link.Index
}

// HasDefault reports whether the namespace has a default route for IPv4 or IPv6.
func (n *NS) HasDefault(is4 bool) (bool, error) {
	r, err := n.defaultRoute(int(familyOf(is4)))
	return r.LinkIndex != 0 || len(r.MultiPath) > 0, err
}

// UplinkMTU returns the smallest MTU of the IPv4 and IPv6 default routes and of their links, or 0 without a default route.
func (n *NS) UplinkMTU() (int, error) {
	smallest := 0
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		r, err := n.defaultRoute(family)
		if err != nil {
			return 0, err
		}
		index := r.LinkIndex
		if len(r.MultiPath) > 0 {
			index = r.MultiPath[0].LinkIndex
		}
		if index == 0 {
			continue
		}
		link, ok, err := n.LinkByIndex(index)
		if err != nil {
			return 0, err
		}
		for _, m := range []int{r.MTU, link.MTU} {
			if ok && m > 0 && (smallest == 0 || m < smallest) {
				smallest = m
			}
		}
	}
	return smallest, nil
}

// defaultRoute returns the default route of a family, or the zero value. It asks for the route to a documentation address (RFC 5737, RFC
// 3849), which usually only the default route matches; if another one does, it reads all routes.
func (n *NS) defaultRoute(family int) (netlink.Route, error) {
	to := netip.MustParseAddr(map[int]string{netlink.FAMILY_V4: documentationV4, netlink.FAMILY_V6: "2001:db8::1"}[family])
	is := func(r netlink.Route) bool {
		dst, ok := Prefix(r.Dst)
		return r.Type == unix.RTN_UNICAST && (!ok || dst.Bits() == 0)
	}
	if r, err := n.routeGet(to, &netlink.RouteGetOptions{FIBMatch: true}); err == nil && is(r) {
		return r, nil
	}
	routes, err := n.listRoutes(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return netlink.Route{}, err
	}
	best := netlink.Route{Priority: math.MaxInt}
	for _, r := range routes {
		if is(r) && r.Priority < best.Priority {
			best = r
		}
	}
	return best, nil
}

// KeepRouterAdvertisements sets accept_ra to 2 on the links that have a default route from a router advertisement. With 1, the kernel
// deletes this route and ignores further advertisements once IPv6 forwarding is enabled (Documentation/networking/ip-sysctl.rst). It is a
// no-op if that is already so.
func (n *NS) KeepRouterAdvertisements() error {
	if on, err := n.Forwards(false); on || IsNoFamily(err) {
		return nil // too late, or the kernel has no IPv6
	} else if err != nil {
		return err
	}
	links, err := n.AdvertisedUplinks()
	for _, link := range links {
		path := "ipv6/conf/" + link + "/accept_ra"
		if value, _ := n.Get(path); value == "1" && err == nil {
			err = n.Set(Sysctl{path, "2"})
		}
	}
	return err
}

// AdvertisedUplinks returns the links that have a default route from a router advertisement.
func (n *NS) AdvertisedUplinks() (names []string, err error) {
	routes, err := n.listRoutes(netlink.FAMILY_V6, &netlink.Route{Protocol: unix.RTPROT_RA}, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if dst, ok := Prefix(r.Dst); ok && dst.Bits() > 0 {
			continue
		}
		switch link, ok, err := n.LinkByIndex(r.LinkIndex); {
		case err != nil:
			return nil, err
		case ok && !slices.Contains(names, link.Name):
			names = append(names, link.Name)
		}
	}
	return names, nil
}
