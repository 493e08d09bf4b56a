// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// Each constant from oneNUMA to jain is the index of a measure in runFigures, the results of a run.
const (
	oneNUMA = iota
	oneNUMAWithRoom
	onePF
	distinctPFs
	nearCPUs
	full
	refused
	avoidable
	largestOnNode
	largestOnPF
	wholePF
	gap
	jain
	measureCount
)

// measureColumn is one measure as a column.
type measureColumn struct {
	title  string
	digits int
	lower  bool // this direction is better
}

func measures() [measureCount]measureColumn {
	return [measureCount]measureColumn{
		oneNUMA:         {"near one NUMA node, %", 1, false},
		oneNUMAWithRoom: {"near one, of those a node had room for, %", 1, false},
		onePF:           {"of one PF, %", 1, false},
		distinctPFs:     {"each VF of another PF, %", 1, false},
		nearCPUs:        {"VFs and CPUs near one node, % of pods", 1, false},
		full:            {"too few VFs free, % of pods", 2, true},
		refused:         {"refused with enough VFs free, % of pods", 2, true},
		avoidable:       {"of these avoidable by placing all pods again, % of pods", 2, true},
		largestOnNode:   {"free VFs near one node, %", 1, false},
		largestOnPF:     {"free VFs of one PF, %", 1, false},
		wholePF:         {"8 of one PF, when 8 are free, %", 1, false},
		gap:             {"most - fewest used of a PF", 1, true},
		jain:            {"Jain's index of PFs", 3, false},
	}
}

// row has the results of one choiceMethod for one topology and policy of the Topology Manager.
type row struct {
	topology  topology
	policy    kubelet.Policy
	allocator choiceMethod
	runs      []runFigures
}

type report struct {
	options
	rows []row
}

// runAll simulates all methods of choosing VFs with the same pods.
func runAll(o options) (*report, error) {
	r := &report{options: o}
	for _, t := range o.topologies {
		m, err := newMachine(t)
		if err != nil {
			return nil, err
		}
		for _, p := range o.policies {
			for _, a := range o.allocators {
				r.rows = append(r.rows, row{t, p, a, make([]runFigures, o.seeds)})
			}
		}
		rows := r.rows[len(r.rows)-len(o.policies)*len(o.allocators):]
		for seed := range o.seeds {
			pods := podTrace(uint64(seed), o.pods, o.load, len(m.ids))
			for i := range rows {
				if rows[i].runs[seed], err = simulateRun(m, o, rows[i].policy, rows[i].allocator, uint64(seed), pods); err != nil {
					return nil, err
				}
			}
		}
	}
	return r, nil
}

// meanOf returns the mean of the measure with the index i over all runs, with its confidence interval.
func (r row) meanOf(i int) meanInterval {
	runs := make([]float64, len(r.runs))
	for seed, f := range r.runs {
		runs[seed] = f[i]
	}
	return confidenceInterval(runs)
}

// differenceFrom returns the mean difference from another method's results. Both had the same random pods in each run, so most random
// effects cancel out.
func (r row) differenceFrom(other row, i int) meanInterval {
	runs := make([]float64, len(r.runs))
	for seed, f := range r.runs {
		runs[seed] = f[i] - other.runs[seed][i]
	}
	return confidenceInterval(runs)
}

// isSame reports whether two rows have the same topology, the same policy and the same method of choosing VFs.
func (r row) isSame(other row) bool {
	return r.topology == other.topology && r.policy == other.policy && r.allocator == other.allocator
}

// findRow returns the results of a method for the given topology and policy.
func (r *report) findRow(t topology, p kubelet.Policy, a choiceMethod) (row, bool) {
	for _, row := range r.rows {
		if row.topology == t && row.policy == p && row.allocator == a {
			return row, true
		}
	}
	return row{}, false
}

// loss is a measure for which a method of Podlace is worse than the kubelet's random choice.
type loss struct {
	row
	measure      int
	ours, theirs meanInterval
}

// findLosses returns the measures for which Podlace is significantly worse: zero is outside the difference's confidence interval.
func (r *report) findLosses() []loss {
	var out []loss
	for _, ours := range r.rows {
		theirs, ok := r.findRow(ours.topology, ours.policy, random)
		if !ok || !ours.allocator.isOurs() {
			continue
		}
		for i, m := range measures() {
			d := ours.differenceFrom(theirs, i)
			if m.lower {
				d.mean = -d.mean
			}
			if r.isShown(i) && d.mean+d.half < 0 {
				out = append(out, loss{ours, i, ours.meanOf(i), theirs.meanOf(i)})
			}
		}
	}
	return out
}

// isShown reports whether the report contains a measure, which for nearCPUs it does only if pods request CPUs.
func (r *report) isShown(measure int) bool { return measure != nearCPUs || r.cpus > 0 }

// comparisonCount returns the number of comparisons that findLosses makes.
func (r *report) comparisonCount() int {
	n := 0
	for _, row := range r.rows {
		if _, ok := r.findRow(row.topology, row.policy, random); ok && row.allocator.isOurs() {
			for i := range measureCount {
				n += count(r.isShown(i))
			}
		}
	}
	return n
}
