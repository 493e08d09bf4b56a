// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"net/netip"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// check() compares the leases with prevResult. Each address in the configured ranges must be leased to this attachment. The configured
// ranges may contain keywords that stand for the node's CIDRs. If the node's CIDRs are unknown, check() does not know the configured
// ranges. In this case, at least one address in prevResult must have a lease, and each such lease must belong to this attachment.
func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	unknown := errors.Is(err, errNoPodCIDR)
	if err != nil && !unknown {
		return err
	}
	if unknown {
		r.Log.Warn("the ranges are not known", "error", err)
		cfg.Dir = parseDir(r)
	}
	dir, err := store.Open(cfg.Dir)
	if err != nil {
		return plugin.Differs("lease folder: %w", err)
	}
	defer dir.Close()
	leased := 0
	for _, ip := range r.Prev.IPs {
		p, ok := kernel.Prefix(&ip.Address)
		if !ok || !unknown && !cfg.serves(p.Addr()) {
			continue
		}
		err := checkLease(dir, p.Addr(), r.Attachment())
		if unknown && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		leased++
	}
	if unknown && leased == 0 {
		return plugin.Differs("no address of prevResult is leased to container %q interface %q", r.ContainerID, r.IfName)
	}
	return nil
}

func checkLease(dir *store.Dir, addr netip.Addr, a plugin.Attachment) error {
	data, err := dir.Read(addr.String())
	if err != nil {
		return plugin.Differs("lease of %s: %w", addr, err)
	}
	if of := parseOwner(data); !owns(of, a) {
		return plugin.Differs("the lease of %s belongs to container %q interface %q", addr, of.ContainerID, of.IfName)
	}
	return nil
}

func (c Config) serves(addr netip.Addr) bool {
	for _, set := range c.Sets {
		if _, ok := set.find(addr); ok {
			return true
		}
	}
	return false
}
