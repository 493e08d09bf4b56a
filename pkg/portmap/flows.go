// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"log/slog"
	"maps"
	"slices"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/ports"
)

// endFlows only logs failures. If the deletion of connection tracking entries fails, a client that keeps sending UDP reaches the previous
// pod until the client's entry expires.
func endFlows(host *kernel.Node, of []ports.Port) {
	if err := delFlows(host, of); err != nil {
		slog.Warn("stale UDP connections could not be removed", "error", err)
	}
}

// delFlows deletes the connection tracking entries of the UDP ports. Without this deletion, a client that keeps sending from one source
// port would reach the previous pod or no pod. If there are no UDP ports, delFlows does nothing.
func delFlows(host *kernel.Node, of []ports.Port) error {
	wanted, families := map[uint16][]ports.Port{}, map[bool]bool{}
	for _, p := range ports.Singles(of) {
		if p.Protocol == "udp" {
			wanted[p.Port] = append(wanted[p.Port], p)
			families[p.Is4()] = true
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	table, err := kernel.OpenConntrack()
	if err != nil {
		return err
	}
	defer table.Close()
	flows, err := table.UDPFlows(slices.Collect(maps.Keys(wanted)), slices.Collect(maps.Keys(families)))
	stale := slices.DeleteFunc(flows, func(f kernel.UDPFlow) bool {
		return !slices.ContainsFunc(wanted[f.To.Port()], func(p ports.Port) bool { return isStaleFlow(f, p) })
	})
	if err != nil || len(stale) == 0 {
		return err
	}
	local, err := host.LocalAddresses()
	if err != nil {
		return err
	}
	return table.DelUDP(slices.DeleteFunc(stale, func(f kernel.UDPFlow) bool { return !local[f.To.Addr()] && !f.To.Addr().IsLoopback() }))
}

// isStaleFlow reports whether a connection tracking entry for the port would prevent a client from reaching the pod. The entry is stale if
// its packets go to the node itself, because the entry is older than the mapping of the port. An entry whose packets go to the pod's
// address is also stale, because the mapping that created it may have changed or ended. The caller checks that the destination of the
// connection tracking entry is an address of the node.
func isStaleFlow(f kernel.UDPFlow, p ports.Port) bool {
	if f.To.Addr().Is4() != p.Is4() || p.HostIP.IsValid() && p.HostIP != f.To.Addr() {
		return false
	}
	return f.Answer == f.To || f.Answer.Addr() == p.To.Addr()
}
