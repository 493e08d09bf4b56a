// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/podlace/podlace/pkg/kubelet"
)

// The measures, in the order of figures.
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

// measure is a column of the table.
type measure struct {
	title  string
	digits int
	lower  bool // this direction is better
}

func measures() [measureCount]measure {
	return [measureCount]measure{
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

// row contains the results of one method.
type row struct {
	topology  topology
	policy    kubelet.Policy
	allocator allocator
	runs      []figures
}

type report struct {
	options
	rows []row
}

// run simulates all methods with the same pods.
func run(o options) (*report, error) {
	r := &report{options: o}
	for _, t := range o.topologies {
		m, err := newMachine(t)
		if err != nil {
			return nil, err
		}
		for _, p := range o.policies {
			for _, a := range o.allocators {
				r.rows = append(r.rows, row{t, p, a, make([]figures, o.seeds)})
			}
		}
		rows := r.rows[len(r.rows)-len(o.policies)*len(o.allocators):]
		for seed := range o.seeds {
			pods := trace(uint64(seed), o.pods, o.load, len(m.ids))
			for i := range rows {
				if rows[i].runs[seed], err = simulate(m, o, rows[i].policy, rows[i].allocator, uint64(seed), pods); err != nil {
					return nil, err
				}
			}
		}
	}
	return r, nil
}

// of returns the mean of a measure.
func (r row) of(i int) interval {
	runs := make([]float64, len(r.runs))
	for seed, f := range r.runs {
		runs[seed] = f[i]
	}
	return confidence(runs)
}

// against returns the mean difference from another row, run by run. Both had the same pods, so that most random effects cancel out.
func (r row) against(other row, i int) interval {
	runs := make([]float64, len(r.runs))
	for seed, f := range r.runs {
		runs[seed] = f[i] - other.runs[seed][i]
	}
	return confidence(runs)
}

// same reports whether another row has the same results.
func (r row) same(other row) bool {
	return r.topology == other.topology && r.policy == other.policy && r.allocator == other.allocator
}

// find returns the row of a method.
func (r *report) find(t topology, p kubelet.Policy, a allocator) (row, bool) {
	for _, row := range r.rows {
		if row.topology == t && row.policy == p && row.allocator == a {
			return row, true
		}
	}
	return row{}, false
}

// loss is a measure in which one of Podlace's methods is worse than the kubelet's.
type loss struct {
	row
	measure      int
	ours, theirs interval
}

// losses returns the measures whose confidence interval of the difference excludes zero.
func (r *report) losses() []loss {
	var out []loss
	for _, ours := range r.rows {
		theirs, ok := r.find(ours.topology, ours.policy, random)
		if !ok || !ours.allocator.ours() {
			continue
		}
		for i, m := range measures() {
			d := ours.against(theirs, i)
			if m.lower {
				d.mean = -d.mean
			}
			if r.shows(i) && d.mean+d.half < 0 {
				out = append(out, loss{ours, i, ours.of(i), theirs.of(i)})
			}
		}
	}
	return out
}

// shows omits measures that are equal without CPUs.
func (r *report) shows(measure int) bool { return measure != nearCPUs || r.cpus > 0 }

// compared returns the number of comparisons of losses.
func (r *report) compared() int {
	n := 0
	for _, row := range r.rows {
		if _, ok := r.find(row.topology, row.policy, random); ok && row.allocator.ours() {
			for i := range measureCount {
				n += count(r.shows(i))
			}
		}
	}
	return n
}
