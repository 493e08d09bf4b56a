// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	leaseSubnet = "10.96.0.0/16"
	leaseCount  = 10_000
	leaseRounds = 15 // the reference is too slow for more
	fullRounds  = 5

	besideNone = "none"
	besideMany = "many"
)

// entryName names a measured case by plugin set and condition, such as "many other pods".
func entryName(side, what string) string { return side + " " + what }

func (f pluginFolders) bothSides() []pluginSet {
	return []pluginSet{{sideOurs, f.plugins}, {sideReference, f.reference}}
}

// measureLeases measures host-local with an empty and with a full lease folder.
func (r *report) measureLeases(o options, n nodes) {
	count := o.scaledSize(leaseCount)
	entries := map[string]*contenderEntry{}
	var all []*contenderEntry
	for _, side := range o.bothSides() {
		for _, what := range []string{besideNone, besideMany} {
			c, err := n.leaseChain(side, what, leaseSubnet)
			if err == nil && what == besideMany {
				err = fillLeases(c.network, count)
			}
			if err != nil {
				r.fail("leases", err)
				return
			}
			name := entryName(side.name, what)
			entries[name] = newEntry(name, c)
			all = append(all, entries[name])
		}
	}
	runRounds(all, min(o.rounds, leaseRounds))
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		r.addGrowth(fmt.Sprintf("host-local %s, %s leases", verb, thousands(count)), growthBar, r.compareMedians(entries, verb))
	}
	r.measureFull(o, n)
}

// compareMedians returns the medians of a verb on an empty and a full node. It omits a plugin set whose measurement failed, and reports
// each failure once.
func (r *report) compareMedians(entries map[string]*contenderEntry, verb string) map[string]figure {
	sides := map[string]figure{}
	for _, side := range []string{sideOurs, sideReference} {
		base, many := entries[entryName(side, besideNone)], entries[entryName(side, besideMany)]
		if base == nil {
			continue
		}
		if err := errors.Join(base.err, many.err); err != nil {
			if verb == verbAdd {
				r.fail(side, err)
			}
			continue
		}
		sides[side] = figure{Base: p50(base.samples[verb].chain), Value: p50(many.samples[verb].chain)}
	}
	return sides
}

func (n nodes) leaseChain(side pluginSet, what, subnet string) (*chain, error) {
	name := "leases-" + side.name + "-" + what
	return n.chainOf(name, "node-"+side.name, side, pluginConf{
		"type": "host-local",
		"ipam": map[string]any{"type": "host-local", "ranges": [][]map[string]any{{{"subnet": subnet}}}},
	})
}

// chainOf returns a chain for a new pod in a new network, both with the given name.
func (n nodes) chainOf(name, nodeName string, side pluginSet, plugins ...pluginConf) (*chain, error) {
	node, err := n.open(nodeName)
	if err != nil {
		return nil, err
	}
	pod, err := n.open(name)
	if err != nil {
		return nil, err
	}
	return &chain{folder: side.folder, network: name, id: containerID(name), node: node, pod: pod, plugins: plugins}, nil
}

// containerID returns an ID as long as a runtime's.
func containerID(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:])
}

// fillLeases writes lease files for a number of pods, in the format of both plugin sets.
func fillLeases(network string, count int) error {
	folder := filepath.Join(resultsFolder, network)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("lease folder: %w", err)
	}
	addr := netip.MustParsePrefix(leaseSubnet).Addr().Next() // the gateway's address
	for i := range count {
		addr = addr.Next()
		if err := writeLease(folder, addr, containerID(fmt.Sprint(network, i))); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(folder, "last_reserved_ip.0"), []byte(addr.String()), 0o600)
}

func writeLease(folder string, addr netip.Addr, id string) error {
	return os.WriteFile(filepath.Join(folder, addr.String()), []byte(id+"\r\n"+podInterface), 0o600)
}

// measureFull measures an ADD that fails because the whole range is leased.
func (r *report) measureFull(o options, n nodes) {
	for _, subnet := range []string{"10.96.0.0/24", leaseSubnet} {
		sides := map[string]figure{}
		for _, side := range o.bothSides() {
			took, err := n.timeFull(side, subnet)
			if err != nil {
				r.fail("full "+subnet, err)
				return
			}
			sides[side.name] = figure{Value: p50(took)}
		}
		r.addLoad("host-local ADD, full "+subnet, 1, sides)
	}
}

func (n nodes) timeFull(side pluginSet, subnet string) (took []time.Duration, err error) {
	c, err := n.leaseChain(side, "full", subnet)
	if err == nil {
		err = fillLeases(c.network, 1<<(32-netip.MustParsePrefix(subnet).Bits())-3)
	}
	for range fullRounds {
		if err != nil {
			return nil, err
		}
		err = c.run(verbAdd, func(inv invocation) ([]byte, error) {
			out, cost, err := inv.runTimed()
			took = append(took, cost.wall)
			if err == nil || !strings.Contains(err.Error(), "no IP addresses available") {
				return nil, fmt.Errorf("ADD in a full range: %s, %w", out, err)
			}
			return nil, nil
		})
	}
	return took, errors.Join(err, os.RemoveAll(filepath.Join(resultsFolder, c.network)))
}
