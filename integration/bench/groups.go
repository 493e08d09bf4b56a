// SPDX-License-Identifier: Apache-2.0

package main

import "slices"

// measurement fills tables of the report.
type measurement struct {
	group, says string
	measure     func(r *report, o *options, n nodes, temporary string)
}

// measurements are in the order in which they run: those that leave the kernel much to clean up come last.
func measurements() []measurement {
	plain := func(f func(*report, options, nodes)) func(*report, *options, nodes, string) {
		return func(r *report, o *options, n nodes, _ string) { f(r, *o, n) }
	}
	return []measurement{
		{groupChains, "chains", measureChains},
		{groupDatapath, "throughput", measureThroughput},
		{groupDatapath, "first second of a limited pod", plain((*report).measureFirstSecond)},
		{"leases", "host-local beside many leases", plain((*report).measureLeases)},
		{"stacks", "dual stack, CHECK", plain((*report).measureStacks)},
		{"gc", "GC", plain((*report).measureGC)},
		{"drift", "drift", plain((*report).measureDrift)},
		{"parallel", "many at once", plain((*report).measureParallel)},
		{groupSRIOV, "VFs", measureSRIOV},
		{"hostports", "hostPorts", plain((*report).measurePorts)},
		{"hostports", "connections to hostPorts", plain((*report).measureConnections)},
		{groupShaping, "limits", plain((*report).measureLimits)},
		{groupShaping, "round trips beside traffic", plain((*report).measureRoundTrips)},
		{groupShaping, "bandwidth beside many pods with limits", plain((*report).measureLimitedPods)},
		{"pods", "bridge beside many pods", plain((*report).measurePods)},
	}
}

func groupNames() []string {
	names := []string{groupAll, groupScale}
	for _, m := range measurements() {
		if !slices.Contains(names, m.group) {
			names = append(names, m.group)
		}
	}
	return names
}

// wants tells whether a group was asked for, by its name or by one that stands for several.
func (o options) wants(group string) bool {
	return slices.ContainsFunc(o.groups, func(asked string) bool {
		return asked == group || asked == groupAll || asked == groupScale && group != groupChains && group != groupDatapath
	})
}

// buildFloorsOnce builds the floor programs when a group first needs them.
func (r *report) buildFloorsOnce(o *options, temporary string) {
	if o.floorGo == "" && o.floorC == "" {
		r.skip(o.buildFloors(temporary)...)
	}
}

func measureChains(r *report, o *options, n nodes, temporary string) {
	r.buildFloorsOnce(o, temporary)
	for _, s := range scenarios() {
		r.measureChain(*o, n, s)
	}
	r.addSizes(o.folders)
}

func measureThroughput(r *report, o *options, n nodes, temporary string) {
	r.buildFloorsOnce(o, temporary)
	r.measureDatapath(*o, n)
}
