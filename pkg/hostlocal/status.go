// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// status() returns an error only if no ADD can succeed. An exhausted pool is not an error by default, because addresses become free when
// pods are deleted. With strictStatus in the configuration, an exhausted pool is an error. STATUS waits for no lock. It creates
// lost leases of live pods again, and notes when a pool becomes exhausted or has free addresses again.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if errors.Is(err, errNoPodCIDR) {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	if err != nil {
		return err
	}
	if err := store.Writable(cfg.Dir); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "lease folder: %w", err)
	}
	attachment.ReportRestore(r, attachment.Trying, restore(r.Network, r.Log, attachment.Trying, nil))
	full, err := cfg.exhaustedSets(r)
	if err != nil {
		return err
	}
	cfg.logExhausted(r, full)
	if len(full) > 0 && cfg.Strict {
		return plugin.WithHint(plugin.Errorf(plugin.CodeNotAvailable, "no IP addresses available in range set: %s", full[0]),
			"strictStatus is set")
	}
	return nil
}

// logExhausted writes one log line when range sets become exhausted, and one log line when they have free addresses again. For each pool of
// a network, logExhausted stores in a file whether the pool was exhausted at the last call.
func (c Config) logExhausted(r *plugin.Request, full []string) {
	pool := fnv.New64a()
	fmt.Fprint(pool, c.Dir, c.Sets)
	if !attachment.Changed(r, fmt.Sprintf("exhausted-%x", pool.Sum64()), strings.Join(full, "\n")) {
		return
	}
	if len(full) > 0 {
		r.Log.Warn("no IP addresses available", "exhausted", full)
	} else {
		r.Log.Info("IP addresses are available again")
	}
}

// exhaustedSets describes the range sets that have no free address.
func (c Config) exhaustedSets(r *plugin.Request) (full []string, err error) {
	dir, err := store.Open(c.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, plugin.Errorf(plugin.CodeNotAvailable, "lease folder: %w", err)
	}
	defer dir.Close()
	l := &leases{dir: dir, network: r.Network, log: r.Log}
	taken, err := l.leasedNames()
	if err != nil {
		return nil, plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	for _, set := range c.Sets {
		if usage, none := set.usage(taken); none && !l.hasEarlier(set) {
			full = append(full, fmt.Sprintf("%s: %s in %s", set, usage, c.Dir))
		}
	}
	return full, nil
}

// hasEarlier reports whether an ADD could take an address of the set from a pod of an earlier boot.
func (l *leases) hasEarlier(set RangeSet) bool {
	l.since, _, _ = boot(l.dir) // without it, no lease is earlier
	all, _ := l.all()
	return slices.ContainsFunc(all, func(is lease) bool { _, in := set.find(is.addr); return in && (is.torn() || l.isEarlier(is)) })
}

// Usage describes how many addresses of a range set are leased.
type Usage struct {
	Set    string // the ranges
	IPv4   bool
	Leased int
	Size   float64 // assignable addresses, rounded if there are more than 2^53
}

// ReadUsage returns the usage of each range set in a configuration. ReadUsage takes no lock.
func ReadUsage(r *plugin.Request) (list []Usage, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	taken := map[netip.Addr]bool{}
	dir, err := store.Open(cfg.Dir)
	if err == nil {
		defer dir.Close()
		taken, err = (&leases{dir: dir, log: r.Log}).leasedNames()
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	for _, set := range cfg.Sets {
		list = append(list, Usage{set.String(), set.is4(), set.leasedCount(taken), set.count()})
	}
	return list, nil
}
