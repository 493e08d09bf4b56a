// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	stackSingle = "single"
	stackDual   = "dual"
	driftRounds = 120
	driftParts  = 3 // the first part of the rounds is compared with the last
)

// measureStacks compares the ADD of an attachment with one address and with two, and CHECK with ADD.
func (r *report) measureStacks(o options, n nodes) {
	entries := map[string]*contenderEntry{}
	var all []*contenderEntry
	for _, side := range o.bothSides() {
		for _, stack := range []string{stackSingle, stackDual} {
			ranges := [][]map[string]any{{{"subnet": "10.94.0.0/16"}}}
			if stack == stackDual {
				ranges = append(ranges, []map[string]any{{"subnet": "fd00:94::/64"}})
			}
			name := "stack-" + side.name + "-" + stack
			c, err := n.chainOf(name, "node-"+name, side, pluginConf{
				"type": "bridge", "bridge": "br-stack", "isDefaultGateway": true,
				"ipam": map[string]any{"type": "host-local", "ranges": ranges},
			})
			if err != nil {
				r.fail("dual stack", err)
				return
			}
			e := newEntry(entryName(side.name, stack), c)
			entries[e.side] = e
			all = append(all, e)
		}
	}
	runRounds(all, o.rounds)
	dual, check := map[string]figure{}, map[string]figure{}
	for _, side := range []string{sideOurs, sideReference} {
		single, both := entries[entryName(side, stackSingle)], entries[entryName(side, stackDual)]
		if err := errors.Join(single.err, both.err); err != nil {
			r.fail("dual stack, "+side, err)
			continue
		}
		plain := p50(single.samples[verbAdd].chain)
		dual[side] = figure{Base: plain, Value: p50(both.samples[verbAdd].chain)}
		check[side] = figure{Base: plain, Value: p50(single.samples[verbCheck].chain)}
	}
	r.addGrowth("dual-stack ADD, against single stack", growthBar, dual)
	r.addGrowth("CHECK, against ADD (plain)", 0, check)
}

// measureDrift runs ADD, CHECK and DEL of the full chain repeatedly. The last runs must not take longer than the first.
func (r *report) measureDrift(o options, n nodes) {
	s := nftables()
	sides, missing := o.usableSets(s)
	r.skip(missing...)
	rounds := max(driftParts, o.scaledSize(driftRounds))
	var entries []*contenderEntry
	for _, side := range sides {
		c, err := n.pluginChain(side, "node-drift-"+side.name, s, true)
		if err != nil {
			r.fail("drift", err)
			return
		}
		entries = append(entries, newEntry(side.name, c))
	}
	runRounds(entries, rounds) // alternating, so that both have the same load from other programs
	figures := map[string]figure{}
	for _, e := range entries {
		if e.err != nil {
			r.fail("drift, "+e.side, e.err)
			continue
		}
		figures[e.side] = drift(e.totalTimes())
	}
	r.addGrowth(fmt.Sprintf("full nftables, ADD+CHECK+DEL: last %d of %d, against the first", rounds/driftParts, rounds), driftBar, figures)
}

// totalTimes returns the total time of ADD, CHECK and DEL for each repetition.
func (e *contenderEntry) totalTimes() []time.Duration {
	total := slices.Clone(e.samples[verbAdd].chain)
	for i := range total {
		total[i] += e.samples[verbCheck].chain[i] + e.samples[verbDel].chain[i]
	}
	return total
}

func drift(times []time.Duration) figure {
	part := len(times) / driftParts
	return figure{Base: p50(times[:part]), Value: p50(times[len(times)-part:])}
}
