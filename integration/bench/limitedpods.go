// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/podlace/podlace/integration/meter"
)

const limitedPods = 500

// measureLimitedPods compares a node with one limited pod and one with many, and checks that the limits of the latter hold.
func (r *report) measureLimitedPods(o options, n nodes) {
	count := max(len(directions()), o.scaledSize(limitedPods))
	entries := map[string]*contenderEntry{}
	sampled := &limitedFlow{rate: 10e6, protocol: meter.TCP, streams: 1}
	var all []*contenderEntry
	for _, side := range o.bothSides() {
		for _, what := range []string{besideNone, besideMany} {
			name := "limits-" + side.name + "-" + what
			c, err := n.limitChain(name, name, side, sampled.rate)
			if err == nil && what == besideMany {
				err = n.sampleLimit(c, count, sampled, side, o)
			}
			if err != nil {
				r.fail("pods with limits, "+side.name, err)
				return
			}
			name = entryName(side.name, what)
			entries[name] = newEntry(name, c)
			all = append(all, entries[name])
		}
	}
	runRounds(all, o.rounds)
	for _, verb := range []string{verbAdd, verbDel} {
		r.addGrowth(fmt.Sprintf("bridge and bandwidth %s, %s other pods with limits", verb, thousands(count)), 0,
			r.compareMedians(entries, verb))
	}
	r.addLimit(fmt.Sprintf("%s, beside %s pods", sampled.what(), thousands(count)), shareOfSteady(),
		sampled.medians(func(p *passedShares) []float64 { return p.steady }))
	r.addAlone(entries)
}

// sampleLimit attaches many pods and measures the limits of two. The second waits until the first pod has received all its data, which
// would otherwise delay it.
func (n nodes) sampleLimit(like *chain, count int, sampled *limitedFlow, side pluginSet, o options) error {
	pods, err := n.fillPods(like, count, nil)
	for i, direction := range directions() {
		if err == nil {
			err = sampled.measureFlow(pods[i], flowLane{direction, side.name}, sampled.steadyTime(o))
		}
	}
	return err
}

// addAlone adds rows with the time of the plugin bandwidth without that of bridge.
func (r *report) addAlone(entries map[string]*contenderEntry) {
	growth, both := map[string]map[string]figure{verbAdd: {}, verbDel: {}}, map[string]figure{}
	for _, side := range []string{sideOurs, sideReference} {
		none, many := entries[entryName(side, besideNone)], entries[entryName(side, besideMany)]
		if none.err != nil || many.err != nil {
			continue // the failure was reported before
		}
		for verb, figures := range growth {
			figures[side] = figure{Base: none.pluginMedian("bandwidth", verb), Value: many.pluginMedian("bandwidth", verb)}
		}
		both[side] = figure{Value: growth[verbAdd][side].Base + growth[verbDel][side].Base}
	}
	for _, verb := range []string{verbAdd, verbDel} {
		r.addGrowth(fmt.Sprintf("of it, bandwidth %s", verb), 0, growth[verb])
	}
	r.addLoad("bandwidth alone, ADD and DEL", 0, both)
}

// pluginMedian returns a plugin's median time in milliseconds.
func (e *contenderEntry) pluginMedian(plugin, verb string) float64 {
	return p50(e.samples[verb].processes[plugin])
}
