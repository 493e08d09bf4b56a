// SPDX-License-Identifier: Apache-2.0

package main

import "slices"

// measurementGroup is a set of measurements that -group selects by name. Its results are one or more tables of the report.
type measurementGroup struct {
	group, says string
	measure     func(*report, options, nodes)
}

// measurementGroups returns the groups in order. Those that cause much background work in the kernel are last.
func measurementGroups() []measurementGroup {
	return []measurementGroup{
		{groupChains, "chains", (*report).measureChains},
		{groupDatapath, "throughput", (*report).measureDatapath},
		{groupDatapath, "first second of a limited pod", (*report).measureFirstSecond},
		{"guard", "antiSpoof", (*report).measureGuard},
		{"leases", "host-local beside many leases", (*report).measureLeases},
		{"stacks", "dual stack, CHECK", (*report).measureStacks},
		{"gc", "GC", (*report).measureGC},
		{"drift", "drift", (*report).measureDrift},
		{groupSRIOV, "VFs", (*report).measureSRIOV},
		{"hostports", "hostPorts", (*report).measurePorts},
		{"hostports", "connections to hostPorts", (*report).measureConnections},
		{groupShaping, "limits", (*report).measureLimits},
		{groupShaping, "round trips beside traffic", (*report).measureRoundTrips},
		{groupShaping, "bandwidth beside many pods with limits", (*report).measureLimitedPods},
		{"pods", "bridge beside many pods", (*report).measurePods},
		{"pods", "podlace-pod beside many pods", (*report).measureShippedGrowth},
	}
}

func groupNames() []string {
	names := []string{groupAll, groupScale}
	for _, m := range measurementGroups() {
		if !slices.Contains(names, m.group) {
			names = append(names, m.group)
		}
	}
	return names
}

// isSelected reports whether -group names this group or a set that has it.
func (o options) isSelected(group string) bool {
	return slices.ContainsFunc(o.groups, func(asked string) bool {
		return asked == group || asked == groupAll || asked == groupScale && group != groupChains && group != groupDatapath
	})
}
