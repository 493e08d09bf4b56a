// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/ports"
)

// endFlows only logs failures: at worst, a client that keeps sending UDP reaches the previous pod until its conntrack entry expires.
func endFlows(host *kernel.Node, of []ports.Port) {
	if err := delFlows(host, of); err != nil {
		slog.Warn("stale UDP connections could not be removed", "error", err)
	}
}

// delFlows deletes the conntrack entries of the UDP ports. With them, a client that keeps sending from one source port would reach the
// previous pod, or none.
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
	localAddresses := sync.OnceValues(host.LocalAddresses)
	isStale := func(f kernel.UDPFlow) (bool, error) {
		if !slices.ContainsFunc(wanted[f.To.Port()], func(p ports.Port) bool { return isStaleFlow(f, p) }) {
			return false, nil
		}
		local, err := localAddresses()
		return local[f.To.Addr()] || f.To.Addr().IsLoopback(), err
	}
	return table.DelUDP(slices.Collect(maps.Keys(wanted)), slices.Collect(maps.Keys(families)), isStale)
}

// isStaleFlow reports whether a conntrack entry would keep a client from the pod. Stale are entries to the node itself, which are older
// than the mapping, and those to the pod's address, whose mapping may have changed or ended. Callers check that the entry's destination is
// an address of the node.
func isStaleFlow(f kernel.UDPFlow, p ports.Port) bool {
	if f.To.Addr().Is4() != p.Is4() || p.HostIP.IsValid() && p.HostIP != f.To.Addr() {
		return false
	}
	return f.Answer == f.To || f.Answer.Addr() == p.To.Addr()
}
