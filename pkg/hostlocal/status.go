// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"log/slog"
	"slices"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// status fails only when no ADD can work: an exhausted pool recovers by itself and must not take the node out of service, unless the
// configuration says so. It takes no lock and writes nothing.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if errors.Is(err, errNoPodCIDR) {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	if err != nil {
		return err
	}
	for _, dir := range []string{cfg.Dir, indexPath(cfg.Dir)} {
		if err := store.Writable(dir); err != nil {
			return plugin.Errorf(plugin.CodeNotAvailable, "lease folder: %w", err)
		}
	}
	return cfg.room(r.Log)
}

// room looks for a range set that has no address left.
func (c Config) room(log *slog.Logger) error {
	dir, err := store.Open(c.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "lease folder: %w", err)
	}
	defer dir.Close()
	l := &leases{dir: dir, log: log}
	taken, err := l.names()
	if err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	for _, set := range c.Sets {
		usage, full := set.usage(taken)
		if !full || l.collectable(set) {
			continue
		}
		log.Warn("a range set is exhausted", "set", set, "usage", usage, "folder", c.Dir)
		if c.Strict {
			return plugin.WithHint(plugin.Errorf(plugin.CodeNotAvailable, "no IP addresses available in range set: %s: %s in %s", set, usage, c.Dir),
				"strictStatus is set")
		}
	}
	return nil
}

// collectable tells whether an ADD would find an address of a pod that is gone.
func (l *leases) collectable(set RangeSet) bool {
	dir, err := store.Open(indexPath(l.dir.Path()))
	if err != nil {
		return false
	}
	defer dir.Close()
	boot, err := bootID()
	if err != nil {
		return false
	}
	x := &index{dir: dir, leases: l, boot: boot}
	entries, _ := x.all(true)
	return slices.ContainsFunc(entries, func(e entry) bool { return e.within(set) && x.dead(e) })
}
