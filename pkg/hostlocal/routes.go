// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"reflect"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

type rawRoute struct {
	Dst      string `json:"dst"`
	GW       string `json:"gw"`
	MTU      int    `json:"mtu"`
	AdvMSS   int    `json:"advmss"`
	Priority int    `json:"priority"`
	Table    *int   `json:"table"`
	Scope    *int   `json:"scope"`
}

// parseRoutes refuses invalid and duplicate routes. A gateway may be outside all subnets of the pod, because another route can make it
// reachable.
func parseRoutes(raw []rawRoute, fail func(error)) (routes []*types.Route) {
	for i, r := range raw {
		route, err := parseRoute(r)
		k := slices.IndexFunc(routes, func(o *types.Route) bool { return err == nil && reflect.DeepEqual(o, route) })
		if k >= 0 {
			err = plugin.Errorf(plugin.CodeConfig, "the route to %s is the same as routes[%d]", r.Dst, k)
		}
		if err != nil {
			fail(plugin.KeyErrorf(fmt.Sprintf("routes[%d]", i), "ipam routes[%d]: %w", i, err))
		}
		routes = append(routes, route)
	}
	return routes
}

func parseRoute(raw rawRoute) (*types.Route, error) {
	if raw.Dst == "" {
		return nil, plugin.Errorf(plugin.CodeConfig, "an entry has no dst")
	}
	dst, err := netip.ParsePrefix(raw.Dst)
	if err != nil || dst.Addr().Is4In6() {
		return nil, plugin.Errorf(plugin.CodeConfig, "dst %q: want an address and prefix length such as 0.0.0.0/0", raw.Dst)
	}
	if dst.Addr().Is4() && dst != dst.Masked() { // for IPv6 the kernel drops the host bits itself
		return nil, plugin.Errorf(plugin.CodeConfig, "dst %s: has host bits set, want %s", dst, dst.Masked())
	}
	var gw net.IP
	if raw.GW != "" {
		addr, err := netip.ParseAddr(raw.GW)
		if addr = addr.Unmap(); err != nil || addr.Zone() != "" || addr.Is4() != dst.Addr().Is4() {
			return nil, plugin.Errorf(plugin.CodeConfig, "gw %q: want an address of the family of dst %s", raw.GW, dst)
		}
		gw = addr.AsSlice()
	}
	if err := raw.checkNumbers(); err != nil {
		return nil, err
	}
	return &types.Route{Dst: *kernel.IPNet(dst), GW: gw, MTU: raw.MTU, AdvMSS: raw.AdvMSS, Priority: raw.Priority, Table: raw.Table,
		Scope: raw.Scope}, nil
}

// checkNumbers fails for a number that the kernel would truncate (struct rtmsg, RTA_PRIORITY, RTA_TABLE and RTAX_MTU in rtnetlink(7)), and
// for scope 255, which means that the destination does not exist.
func (r rawRoute) checkNumbers() error {
	for _, n := range []struct {
		key   string
		value *int
		most  int64 // int has 32 bits on some architectures
	}{{"mtu", &r.MTU, 65535}, {"advmss", &r.AdvMSS, 65535}, {"priority", &r.Priority, math.MaxUint32}, {"table", r.Table, math.MaxUint32},
		{"scope", r.Scope, 254}} {
		if n.value != nil && (*n.value < 0 || int64(*n.value) > n.most) {
			return plugin.Errorf(plugin.CodeConfig, "%s %d: want 0-%d", n.key, *n.value, n.most)
		}
	}
	return nil
}
