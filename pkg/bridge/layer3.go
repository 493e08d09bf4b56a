// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net/netip"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// layer3 is the wanted state of the pod's addresses and routes, and of the gateway addresses on the bridge.
type layer3 struct {
	ipam.Plan
	gateways []netip.Prefix // one per address; empty unless the bridge is the gateway
}

// routes6 reports whether the pod gets an IPv6 route, for which IPv6 must be enabled in the pod even if it has no IPv6 address.
func (l layer3) routes6() bool {
	return slices.ContainsFunc(l.Routes, func(r kernel.Route) bool { return r.Dst.Addr().Is6() })
}

// planLayer3 computes the wanted state from the IPAM plugin's result. With isGateway, the default gateway of an address is the first
// address of its subnet; a subnet of one or two addresses has no default. With isDefaultGateway, each address family gets a default route,
// unless the IPAM plugin returned one with a gateway.
func planLayer3(cfg Config, from *types100.Result) (l layer3, err error) {
	if l.Plan, err = ipam.PlanOf(from); err != nil {
		return layer3{}, err
	}
	for i := 0; cfg.Gateway && i < len(l.Addresses); i++ {
		p, ip := l.Addresses[i], l.IPs[i]
		given, _ := netip.AddrFromSlice(ip.Gateway)
		gw, err := GatewayOf(p, given)
		if err != nil {
			return layer3{}, err
		}
		ip.Gateway = gw.AsSlice()
		l.gateways = append(l.gateways, netip.PrefixFrom(gw, p.Bits()))
	}
	if l.Has6() && cfg.MTU != 0 && cfg.MTU < minMTU6 {
		return layer3{}, plugin.Errorf(plugin.CodeConfig, "mtu %d: IPv6 needs at least 1280 (RFC 8200 section 5)", cfg.MTU)
	}
	if cfg.DefaultGateway {
		l.AddDefaults()
	}
	return l, l.AddRoutes()
}

// GatewayOf returns the gateway address that the bridge gets for a pod's address.
func GatewayOf(p netip.Prefix, gw netip.Addr) (netip.Addr, error) {
	if !gw.IsValid() {
		if p.Addr().BitLen()-p.Bits() < 2 { // RFC 3021, RFC 6164: no address is reserved
			return gw, plugin.WithHint(plugin.Errorf(plugin.CodeConfig,
				"isGateway: address %s has no gateway, and a subnet of one or two addresses has none to spare", p),
				`give the range a "gateway": with a /31 or /127 one of its two addresses; a /32 or /128 has none for the bridge`)
		}
		gw = p.Masked().Addr().Next()
	}
	if err := kernel.ValidGateway(p, gw); err != nil {
		return gw, plugin.Errorf(plugin.CodeConfig, "isGateway: gateway %s of address %s: %w", gw, p, err)
	}
	return gw, nil
}

// attachmentResult returns the result of ADD: the entries of earlier plugins, then those of this one.
func (j *job) attachmentResult(w wiring, l layer3, from *types100.Result) *types100.Result {
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
	for _, ip := range l.IPs {
		ip.Interface = types100.Int(podIndex)
		result.IPs = append(result.IPs, ip)
	}
	result.Routes = append(result.Routes, l.Shown...)
	if j.cfg.DNS != nil {
		result.DNS = *j.cfg.DNS
	}
	return result
}
