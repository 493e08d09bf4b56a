// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
)

// rules are those of a policy: how to fill a set of NUMA nodes, and what to minimise before and after the number of nodes and their
// distance.
type rules struct {
	fill   func(*query, nodes) []int        // returns the number of devices of each PF
	before func(*query, nodes, []int) []int // nil if the number of nodes comes first
	after  func(*query, nodes, []int) []int
}

// nodes is a set of NUMA nodes, by index.
type nodes []bool

func rulesOf(p Policy) rules {
	switch p {
	case Pack:
		return rules{(*query).fewestPFs, (*query).pfsUsed, (*query).leftOnPFs}
	case Balance:
		return rules{(*query).evenly, nil, (*query).leftPerPF}
	case DistinctPF:
		return rules{(*query).spreadOut, (*query).perPF, (*query).concentration}
	}
	return rules{(*query).fewestPFs, nil, (*query).leftOnNodes}
}

// choice is a plan with its costs after the number of nodes. Choices of equal earlier costs are compared.
type choice struct {
	distance int
	after    []int
	plan     []int
}

// less breaks ties by the first PF in which the plans differ: more devices there means lower addresses.
func (c *choice) less(other *choice) bool {
	if c.distance != other.distance {
		return c.distance < other.distance
	}
	if d := slices.Compare(c.after, other.after); d != 0 {
		return d < 0
	}
	return slices.Compare(c.plan, other.plan) > 0
}

// solve searches the sets of NUMA nodes, small sets first, for one whose costs in rules.before equal those of the whole machine. It
// stops at the first size with such a set, and returns the best of that size.
func (q *query) solve(r rules) []int {
	all, forced := make(nodes, len(q.distance)), make(nodes, len(q.distance))
	for pf, g := range q.pfs {
		all[g.node] = all[g.node] || len(q.free[pf]) > 0
		forced[g.node] = forced[g.node] || q.count[pf] > 0
	}
	s := search{query: q, rules: r, in: slices.Clone(forced)}
	var plan []int
	if r.before != nil {
		plan = r.fill(q, all)
		s.goal = r.before(q, all, plan)
	}
	for i := range all {
		if all[i] && !forced[i] {
			s.optional = append(s.optional, i)
		}
	}
	for extra := 0; extra <= len(s.optional) && s.best == nil && q.budget > 0; extra++ {
		s.sets(0, extra)
	}
	switch {
	case s.best != nil:
		return s.best.plan
	case plan != nil:
		return plan
	}
	return s.grow()
}

// search walks through the sets of NUMA nodes of one size.
type search struct {
	*query
	rules
	goal     []int
	in       nodes
	optional []int
	best     *choice
}

// sets tries all sets with n more nodes out of the optional ones from index i on.
func (s *search) sets(i, n int) {
	if s.budget <= 0 {
		return
	}
	if n == 0 {
		s.try()
		return
	}
	for ; i+n <= len(s.optional); i++ {
		s.in[s.optional[i]] = true
		s.sets(i+1, n-1)
		s.in[s.optional[i]] = false
	}
}

func (s *search) try() {
	c := choice{distance: s.spread()}
	s.budget -= len(s.pfs) + len(s.in)
	if s.capacity() < s.need || s.best != nil && c.distance > s.best.distance {
		return
	}
	s.budget -= 8 * len(s.pfs)
	c.plan = s.fill(s.query, s.in)
	if s.before != nil && !slices.Equal(s.before(s.query, s.in, c.plan), s.goal) {
		return
	}
	if c.after = s.after(s.query, s.in, c.plan); s.best == nil || c.less(s.best) {
		s.best = &c
	}
}

// grow adds the node with the most free devices until the devices suffice.
func (s *search) grow() []int {
	free := make([]int, len(s.in))
	for pf, g := range s.pfs {
		free[g.node] += len(s.free[pf])
	}
	slices.SortStableFunc(s.optional, func(a, b int) int { return free[b] - free[a] })
	for _, i := range s.optional {
		if s.capacity() >= s.need {
			break
		}
		s.in[i] = true
	}
	return s.fill(s.query, s.in)
}

// capacity counts the free devices of the set.
func (s *search) capacity() int {
	n := 0
	for pf, g := range s.pfs {
		if s.in[g.node] {
			n += len(s.free[pf])
		}
	}
	return n
}

// spread returns the sum of the distances of all pairs of nodes.
func (s *search) spread() int {
	sum := 0
	for i, row := range s.distance {
		for j := range i {
			if s.in[i] && s.in[j] {
				sum += row[j]
			}
		}
	}
	return sum
}
