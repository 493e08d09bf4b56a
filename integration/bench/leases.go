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
	"time"
)

const (
	leaseSubnet    = "10.96.0.0/16"
	leaseCount     = 10_000
	leaseRounds    = 15 // the reference takes long enough for fewer
	rebuildRepeats = 5

	besideNone = "none"
	besideMany = "many"
)

// beside names an entry of one side: alone, or beside many others.
func beside(side, what string) string { return side + " " + what }

// bothSides are the two plugin folders.
func (f folders) bothSides() []side {
	return []side{{sideOurs, f.plugins}, {sideReference, f.reference}}
}

// measureLeases runs host-local as a program of its own, on an empty lease folder and on a full one.
func (r *report) measureLeases(o options, n nodes) {
	count := o.scaled(leaseCount)
	entries := map[string]*entry{}
	chains := map[string]*chain{}
	var all []*entry
	for _, side := range o.bothSides() {
		for _, what := range []string{besideNone, besideMany} {
			c, err := n.leaseChain(side, what)
			if err == nil && what == besideMany {
				err = fillLeases(c.network, count)
			}
			if err != nil {
				r.fail("leases", err)
				return
			}
			name := beside(side.name, what)
			entries[name], chains[name] = newEntry(name, c), c
			all = append(all, entries[name])
		}
	}
	race(all, min(o.rounds, leaseRounds))
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		r.addGrowth(fmt.Sprintf("host-local %s, %s leases", verb, thousands(count)), leasesBar, r.compare(entries, verb))
	}
	if e := entries[beside(sideOurs, besideMany)]; e.err == nil {
		r.measureRebuild(chains[e.side], p50(e.samples[verbAdd].chain))
	}
}

// compare gives the medians of a verb with nothing beside it and with many others. Who failed is left out, and told once.
func (r *report) compare(entries map[string]*entry, verb string) map[string]figure {
	sides := map[string]figure{}
	for _, side := range []string{sideOurs, sideReference} {
		base, many := entries[beside(side, besideNone)], entries[beside(side, besideMany)]
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

func (n nodes) leaseChain(side side, what string) (*chain, error) {
	name := "leases-" + side.name + "-" + what
	return n.chainOf(name, "node-"+side.name, side, pluginConf{
		"type": "host-local",
		"ipam": map[string]any{"type": "host-local", "ranges": [][]map[string]any{{{"subnet": leaseSubnet}}}},
	})
}

// chainOf makes a chain for a pod and a network of that name.
func (n nodes) chainOf(name, nodeName string, side side, plugins ...pluginConf) (*chain, error) {
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

// containerID makes an ID of the length that runtimes use.
func containerID(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:])
}

// fillLeases writes the lease files of so many pods, as either side would have left them.
func fillLeases(network string, count int) error {
	folder := filepath.Join(resultsFolder, network)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("lease folder: %w", err)
	}
	addr := netip.MustParsePrefix(leaseSubnet).Addr().Next() // the gateway
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

// measureRebuild has the lease folder changed by foreign hands, and times the next ADD: what it takes above the others is the rebuild of
// the index.
func (r *report) measureRebuild(c *chain, warm float64) {
	folder := filepath.Join(resultsFolder, c.network)
	last := netip.MustParseAddr("10.96.255.200")
	var samples []time.Duration
	for i := range rebuildRepeats {
		e := newEntry("", c)
		time.Sleep(5 * settle) // where the folder's time is that of the last tick, it must be another one
		err := writeLease(folder, last, containerID(fmt.Sprint("foreign", i)))
		last = last.Next()
		if err == nil {
			err = e.lap(true)
		}
		if err != nil {
			r.fail("rebuild of the index", err)
			return
		}
		samples = append(samples, e.samples[verbAdd].chain...)
	}
	r.addAbsolute("host-local, once after a foreign change: ADD above the others", rebuildBar,
		map[string]figure{sideOurs: {Value: max(0, p50(samples)-warm)}})
}
