// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// layer3 is the wanted state of addresses and routes: a pure function of configuration and IPAM result, which ADD applies and
// CHECK compares with.
type layer3 struct {
	addresses []netip.Prefix // of the pod, with the length of their subnet
	gateways  []netip.Prefix // of the bridge, one for each address; empty unless the bridge is the gateway
	routes    []kernel.Route
	ips       []*types100.IPConfig
	shown     []*types.Route // routes as the result tells them
}

func (l layer3) has6() bool {
	return slices.ContainsFunc(l.addresses, func(a netip.Prefix) bool { return a.Addr().Is6() })
}

// routes6 tells whether the pod gets a route of IPv6: with or without an address, it can have none while IPv6 is off.
func (l layer3) routes6() bool {
	return slices.ContainsFunc(l.routes, func(r kernel.Route) bool { return r.Dst.Addr().Is6() })
}

// planLayer3 derives the wanted state. With isGateway an address without a gateway gets the first address of its subnet, if that has more
// than two; with isDefaultGateway each family gets a default route unless the IPAM plugin gave one with a gateway.
func planLayer3(cfg Config, from *types100.Result) (layer3, error) {
	l := layer3{shown: from.Routes}
	byFamily := map[bool]netip.Addr{} // key: is IPv4
	for _, ip := range from.IPs {
		p, ok := kernel.Prefix(&ip.Address)
		if !ok || p.Bits() == 0 {
			return layer3{}, plugin.Errorf(plugin.CodeConfig, "ipam returned an invalid address %s", ip.Address.String())
		}
		gw, hasGW := netip.AddrFromSlice(ip.Gateway)
		gw = gw.Unmap()
		if !hasGW && cfg.Gateway {
			if p.Addr().BitLen()-p.Bits() < 2 { // RFC 3021, RFC 6164: no address is set apart
				return layer3{}, plugin.WithHint(plugin.Errorf(plugin.CodeConfig,
					"isGateway: address %s has no gateway, and a subnet of one or two addresses has none to spare", p),
					`give the range a "gateway": with a /31 or /127 one of its two addresses; a /32 or /128 has none for the bridge`)
			}
			gw, hasGW = p.Masked().Addr().Next(), true
		}
		if hasGW && (!gw.IsValid() || gw.Is4() != p.Addr().Is4()) {
			return layer3{}, plugin.Errorf(plugin.CodeConfig, "gateway %s of address %s: want an address of the same family", gw, p)
		}
		if hasGW && cfg.Gateway {
			if err := kernel.ValidGateway(p, gw); err != nil {
				return layer3{}, plugin.Errorf(plugin.CodeConfig, "isGateway: gateway %s of address %s: %w", gw, p, err)
			}
		}
		shown := &types100.IPConfig{Address: ip.Address}
		if hasGW {
			shown.Gateway = gw.AsSlice()
			if _, seen := byFamily[gw.Is4()]; !seen {
				byFamily[gw.Is4()] = gw
			}
			if cfg.Gateway {
				l.gateways = append(l.gateways, netip.PrefixFrom(gw, p.Bits()))
			}
		}
		l.addresses = append(l.addresses, p)
		l.ips = append(l.ips, shown)
	}
	if l.has6() && cfg.MTU != 0 && cfg.MTU < minMTU6 {
		return layer3{}, plugin.Errorf(plugin.CodeConfig, "mtu %d: IPv6 needs at least 1280 (RFC 8200 section 5)", cfg.MTU)
	}
	if cfg.DefaultGateway {
		l.addDefaults(byFamily)
	}
	return l, l.planRoutes(byFamily)
}

func (l *layer3) addDefaults(gateways map[bool]netip.Addr) {
	for _, is4 := range []bool{true, false} {
		gw, ok := gateways[is4]
		if !ok || l.hasDefault(is4) {
			continue
		}
		dst := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if !is4 {
			dst = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		l.shown = append(l.shown, &types.Route{Dst: *kernel.IPNet(dst), GW: gw.AsSlice()})
	}
}

func (l *layer3) hasDefault(is4 bool) bool {
	for _, r := range l.shown {
		if dst, ok := kernel.Prefix(&r.Dst); ok && r.GW != nil && dst.Bits() == 0 && dst.Addr().Is4() == is4 {
			return true
		}
	}
	return false
}

func (l *layer3) planRoutes(gateways map[bool]netip.Addr) error {
	for _, r := range l.shown {
		dst, ok := kernel.Prefix(&r.Dst)
		if !ok {
			return plugin.Errorf(plugin.CodeConfig, "route to %s: want a destination with prefix length", r.Dst.String())
		}
		route := kernel.Route{Dst: dst, MTU: r.MTU, AdvMSS: r.AdvMSS, Priority: r.Priority, Table: r.Table, Scope: r.Scope}
		if gw, ok := netip.AddrFromSlice(r.GW); ok {
			route.Gateway = gw.Unmap()
		} else if r.Scope == nil || *r.Scope == 0 {
			route.Gateway = gateways[dst.Addr().Is4()]
		}
		if route.Gateway.IsValid() && route.Gateway.Is4() != dst.Addr().Is4() {
			return plugin.Errorf(plugin.CodeConfig, "route to %s: gateway %s is of the other family", dst, route.Gateway)
		}
		if !l.reaches(route.Gateway) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "route to %s: gateway %s is in no subnet of the pod", dst, route.Gateway),
				"put a route to the gateway with scope 253 (link) before it")
		}
		l.routes = append(l.routes, route)
	}
	return nil
}

// reaches tells whether a gateway can be had by an address of the pod, or by a route before.
func (l *layer3) reaches(gw netip.Addr) bool {
	if !gw.IsValid() || gw.IsLinkLocalUnicast() {
		return true
	}
	return slices.ContainsFunc(l.addresses, func(a netip.Prefix) bool { return a.Masked().Contains(gw) }) ||
		slices.ContainsFunc(l.routes, func(r kernel.Route) bool { return r.Dst.Masked().Contains(gw) })
}

// result lists what the attachment consists of. What plugins before it made stays in front.
func (j *job) result(w wiring, l layer3, from *types100.Result) *types100.Result {
	result := &types100.Result{DNS: from.DNS}
	if prev := j.r.Prev; prev != nil {
		result.Interfaces, result.IPs, result.Routes = prev.Interfaces, prev.IPs, prev.Routes
		if from.DNS.IsEmpty() {
			result.DNS = prev.DNS
		}
	}
	podIndex := len(result.Interfaces) + 2
	for _, i := range []struct {
		link    kernel.Link
		sandbox string
	}{{w.bridge, ""}, {w.host, ""}, {w.pod, j.r.NetnsPath}} {
		result.Interfaces = append(result.Interfaces,
			&types100.Interface{Name: i.link.Name, Mac: i.link.MAC.String(), Mtu: i.link.MTU, Sandbox: i.sandbox})
	}
	if w.gateway.Index != w.bridge.Index {
		result.Interfaces = append(result.Interfaces, &types100.Interface{Name: w.gateway.Name, Mac: w.gateway.MAC.String(), Mtu: w.gateway.MTU})
	}
	for _, ip := range l.ips {
		ip.Interface = types100.Int(podIndex)
		result.IPs = append(result.IPs, ip)
	}
	result.Routes = append(result.Routes, l.shown...)
	if j.cfg.DNS != nil {
		result.DNS = *j.cfg.DNS
	}
	return result
}
