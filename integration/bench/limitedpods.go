// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/podlace/podlace/pkg/meter"
)

const limitedPods = 500

// measureLimitedPods compares a node that has one pod with limits with a node that has many, and checks that the many limits work.
func (r *report) measureLimitedPods(o options, n nodes) {
	count := max(len(directions()), o.scaled(limitedPods))
	entries := map[string]*entry{}
	sampled := &limited{rate: 10e6, protocol: meter.TCP, streams: 1}
	var all []*entry
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
			name = beside(side.name, what)
			entries[name] = newEntry(name, c)
			all = append(all, entries[name])
		}
	}
	race(all, o.rounds)
	for _, verb := range []string{verbAdd, verbDel} {
		r.addGrowth(fmt.Sprintf("bridge and bandwidth %s, %s other pods with limits", verb, thousands(count)), limitedBar,
			r.compare(entries, verb))
	}
	r.addLimit(fmt.Sprintf("%s, beside %s pods", sampled.what(), thousands(count)), shareOfSteady(),
		sampled.medians(func(p *passed) []float64 { return p.steady }))
	r.addAlone(entries)
}

// sampleLimit attaches many pods and measures the limits of two of them. It waits until the first has received everything, because the
// rest would delay the second.
func (n nodes) sampleLimit(like *chain, count int, sampled *limited, side side, o options) error {
	pods, err := n.fillPods(like, count)
	for i, direction := range directions() {
		if err == nil {
			err = sampled.measure(pods[i], lane{direction, side.name}, sampled.steady(o))
		}
	}
	return err
}

// addAlone adds rows with bandwidth's share of the chain.
func (r *report) addAlone(entries map[string]*entry) {
	growth, both := map[string]map[string]figure{verbAdd: {}, verbDel: {}}, map[string]figure{}
	for _, side := range []string{sideOurs, sideReference} {
		none, many := entries[beside(side, besideNone)], entries[beside(side, besideMany)]
		if none.err != nil || many.err != nil {
			continue // the failure was reported before
		}
		for verb, figures := range growth {
			figures[side] = figure{Base: none.alone("bandwidth", verb), Value: many.alone("bandwidth", verb)}
		}
		both[side] = figure{Value: growth[verbAdd][side].Base + growth[verbDel][side].Base}
	}
	for _, verb := range []string{verbAdd, verbDel} {
		r.addGrowth(fmt.Sprintf("of it, bandwidth %s", verb), 0, growth[verb])
	}
	r.addLoad("bandwidth alone, ADD and DEL", bandwidthBar, both)
}

// alone returns the median of one plugin of the chain.
func (e *entry) alone(plugin, verb string) float64 { return p50(e.samples[verb].processes[plugin]) }
