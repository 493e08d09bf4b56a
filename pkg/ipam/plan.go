// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// Plan contains the addresses and routes that an interface should have, from the result of the IPAM plugin. ADD applies it, and CHECK
// compares it with the kernel's state.
type Plan struct {
	Addresses []netip.Prefix // with the prefix length of their subnet
	Routes    []kernel.Route
	IPs       []*types100.IPConfig // in the form of the result
	Shown     []*types.Route       // routes in the form of the result
}

// PlanOf returns a plan with the addresses and gateways in an IPAM plugin's result.
func PlanOf(from *types100.Result) (Plan, error) {
	plan := Plan{Shown: from.Routes}
	for _, ip := range from.IPs {
		p, ok := kernel.Prefix(&ip.Address)
		if !ok || p.Bits() == 0 {
			return Plan{}, plugin.Errorf(plugin.CodeConfig, "ipam returned an invalid address %s", ip.Address.String())
		}
		gw, _ := netip.AddrFromSlice(ip.Gateway)
		if gw = gw.Unmap(); gw.IsValid() && gw.Is4() != p.Addr().Is4() {
			return Plan{}, plugin.Errorf(plugin.CodeConfig, "gateway %s of address %s: want an address of the same family", gw, p)
		}
		plan.Addresses = append(plan.Addresses, p)
		plan.IPs = append(plan.IPs, &types100.IPConfig{Address: ip.Address, Gateway: gw.AsSlice()})
	}
	return plan, nil
}

// firstGateway returns the first gateway of an address family, or the zero Addr.
func (p *Plan) firstGateway(is4 bool) netip.Addr {
	for _, ip := range p.IPs {
		if gw, ok := netip.AddrFromSlice(ip.Gateway); ok && gw.Is4() == is4 {
			return gw
		}
	}
	return netip.Addr{}
}

// Has6 reports whether the plan contains an IPv6 address.
func (p Plan) Has6() bool {
	return slices.ContainsFunc(p.Addresses, func(a netip.Prefix) bool { return a.Addr().Is6() })
}

// AddDefaults adds a default route for each address family with a gateway, unless the IPAM plugin returned one with a gateway.
func (p *Plan) AddDefaults() {
	for _, dst := range []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)} {
		if gw := p.firstGateway(dst.Addr().Is4()); gw.IsValid() && !p.hasGatewayTo(dst) {
			p.Shown = append(p.Shown, &types.Route{Dst: *kernel.IPNet(dst), GW: gw.AsSlice()})
		}
	}
}

func (p *Plan) hasGatewayTo(dst netip.Prefix) bool {
	return slices.ContainsFunc(p.Shown, func(r *types.Route) bool {
		to, ok := kernel.Prefix(&r.Dst)
		return ok && r.GW != nil && to.Masked() == dst
	})
}

// AddRoutes adds the routes in Shown, which have the form of the CNI result, to Routes. A route without a gateway gets the first one of its
// family, unless its scope forbids a gateway.
func (p *Plan) AddRoutes() error {
	for _, r := range p.Shown {
		dst, ok := kernel.Prefix(&r.Dst)
		if !ok {
			return plugin.Errorf(plugin.CodeConfig, "route to %s: want a destination with prefix length", r.Dst.String())
		}
		route := kernel.Route{Dst: dst, MTU: r.MTU, AdvMSS: r.AdvMSS, Priority: r.Priority, Table: r.Table, Scope: r.Scope}
		if gw, ok := netip.AddrFromSlice(r.GW); ok {
			route.Gateway = gw.Unmap()
		} else if r.Scope == nil || *r.Scope == 0 {
			route.Gateway = p.firstGateway(dst.Addr().Is4())
		}
		if route.Gateway.IsValid() && route.Gateway.Is4() != dst.Addr().Is4() {
			return plugin.Errorf(plugin.CodeConfig, "route to %s: gateway %s is of the other family", dst, route.Gateway)
		}
		if !p.reaches(route.Gateway) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "route to %s: gateway %s is in no subnet of the pod", dst, route.Gateway),
				"put a route to the gateway with scope 253 (link) before it")
		}
		p.Routes = append(p.Routes, route)
	}
	return nil
}

// reaches reports whether the pod can reach a gateway: a link-local address, or one in its subnets or in the destination of an earlier
// route.
func (p *Plan) reaches(gw netip.Addr) bool {
	if !gw.IsValid() || gw.IsLinkLocalUnicast() {
		return true
	}
	return slices.ContainsFunc(p.Addresses, func(a netip.Prefix) bool { return a.Masked().Contains(gw) }) ||
		slices.ContainsFunc(p.Routes, func(r kernel.Route) bool { return r.Dst.Masked().Contains(gw) })
}
