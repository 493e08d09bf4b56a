// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"slices"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// check requires that each address of prevResult in the configured ranges is leased to this attachment. If the node's CIDRs are unknown, so
// may be the ranges: one address then needs a lease, and no lease may be another attachment's.
func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	unknown := NoPodCIDR(err)
	if err != nil && !unknown {
		return err
	}
	if unknown {
		r.Log.Warn("the ranges are unknown without the node's podCIDRs: CHECK only looks for leases of the attachment", "error", err)
		cfg.Dir = parseDir(r)
	}
	dir, err := store.Open(cfg.Dir)
	if err != nil {
		return plugin.Differs("lease folder: %w", err)
	}
	defer dir.Close()
	l, leased := &leases{dir: dir, network: r.Network, log: r.Log}, 0
	for _, ip := range r.Prev.IPs {
		p, ok := kernel.Prefix(&ip.Address)
		serves := func(set RangeSet) bool { _, in := set.find(p.Addr()); return in }
		if !ok || !unknown && !slices.ContainsFunc(cfg.Sets, serves) {
			continue
		}
		switch is, found := l.read(p.Addr()); {
		case found && owns(is.of, r.Attachment()):
			leased++
		case found:
			return plugin.Differs("the lease of %s belongs to %s", p.Addr(), l.describe(is.of))
		case !unknown:
			return plugin.Differs("the lease of %s is missing", p.Addr())
		}
	}
	if unknown && leased == 0 {
		return plugin.Differs("no address of prevResult is leased to container %q interface %q", r.ContainerID, r.IfName)
	}
	return nil
}
