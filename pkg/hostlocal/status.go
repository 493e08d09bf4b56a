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

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// status fails only if no ADD can succeed. An exhausted pool counts only with strictStatus, because addresses become free when pods are
// deleted.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if NoPodCIDR(err) {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	if err != nil {
		return err
	}
	if err := errors.Join(store.Writable(cfg.Dir), lockable(cfg.Dir)); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "lease folder: %w", err)
	}
	leased, err := cfg.leased()
	if err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	attachment.ReportRestore(r, attachment.Trying, restoreLost(cfg, leased, r))
	full := cfg.exhaustedSets(cfg.usage(leased))
	cfg.logExhausted(r, full)
	if len(full) > 0 && cfg.Strict {
		return plugin.WithHint(plugin.Errorf(plugin.CodeNotAvailable, "no IP addresses available in range set: %s", full[0]),
			"strictStatus is set; 'podlace gc --yes' frees addresses of dead pods; otherwise enlarge the range")
	}
	return nil
}

// lockable returns an error if something other than a file is where the lock file should be. It creates none.
func lockable(path string) error {
	dir, err := store.Open(path)
	if err == nil {
		defer dir.Close()
		_, err = dir.Read(lockFile)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return err
}

// logExhausted writes one log line when range sets become exhausted, and one when they have free addresses again. A note for each pool says
// which were exhausted at the last call.
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

// exhaustedSets describes the range sets without a free address or one that ADD could take from a pod of an earlier boot.
func (c Config) exhaustedSets(usage []Usage) (full []string) {
	usage = slices.DeleteFunc(usage, func(u Usage) bool { return !u.Full() })
	if len(usage) == 0 {
		return nil
	}
	l, all, _ := readLeases(c.Dir) // without the boot file, no lease is of an earlier boot
	for _, u := range usage {
		if !slices.ContainsFunc(all, func(is lease) bool { return l.isReusable(u.Set, is) }) {
			full = append(full, fmt.Sprintf("%s: %s in %s", u.Set, u, c.Dir))
		}
	}
	return full
}

// Usage describes how many addresses of a range set are leased.
type Usage struct {
	Set    RangeSet
	IPv4   bool
	Leased int
	Size   float64 // assignable addresses, rounded if there are more than 2^53
}

// Full reports whether all addresses of the set are leased.
func (u Usage) Full() bool { return float64(u.Leased) >= u.Size }

// String returns a text such as "3 of 253 addresses are leased".
func (u Usage) String() string {
	return fmt.Sprintf("%d of %.0f addresses are leased", u.Leased, u.Size)
}

// ReadUsage returns the usage of each range set in a configuration. It takes no lock.
func ReadUsage(r *plugin.Request) ([]Usage, error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	leased, err := cfg.leased()
	if err != nil {
		return nil, err
	}
	return cfg.usage(leased), nil
}

// leased returns the addresses that have a lease in the folder, in their order.
func (c Config) leased() (names []netip.Addr, err error) {
	dir, err := store.Open(c.Dir)
	if err == nil {
		defer dir.Close()
		names, err = (&leases{dir: dir}).names()
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	return names, nil
}

func (c Config) usage(leased []netip.Addr) (list []Usage) {
	for _, set := range c.Sets {
		list = append(list, set.usage(leased))
	}
	return list
}
