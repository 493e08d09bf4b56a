// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
)

// policyRules contains the rules of a policy in the form of three functions. The first function chooses devices on a set of NUMA nodes. The
// second function and the third function return costs. The search first minimises the costs from the second function. If these costs are
// equal, the search minimises three values in this order: the number of NUMA nodes, their distance, and the costs from the third function.
type policyRules struct {
	fill   func(*query, nodeSet) []int        // returns the number of devices of each PF
	before func(*query, nodeSet, []int) []int // nil if the number of nodes comes first
	after  func(*query, nodeSet, []int) []int
}

// The type nodeSet is a set of NUMA nodes, by index.
type nodeSet []bool

func rulesOf(p Policy) policyRules {
	switch p {
	case Pack:
		return policyRules{(*query).fewestPFs, (*query).pfsUsed, (*query).leftOnPFs}
	case Balance:
		return policyRules{(*query).fillEvenly, nil, (*query).leftPerPF}
	case DistinctPF:
		return policyRules{(*query).fillSpread, (*query).perPF, (*query).concentration}
	}
	return policyRules{(*query).fewestPFs, nil, (*query).leftOnNodes}
}

// The type choice contains a possible plan, which is the number of devices of each PF, and the costs of this plan. A choice contains only
// two of the costs: the distance, and the costs from policyRules.after. The costs from policyRules.before and the number of NUMA nodes are
// equal for all choices that the search compares.
type choice struct {
	distance int
	after    []int
	plan     []int
}

// less() reports whether this choice is better than another choice. If the costs are equal, less() compares the number of devices of each
// PF, in the order of the PFs' addresses. The better choice has more devices on the first PF whose number of devices differs. The better
// choice therefore uses the devices with lower addresses.
func (c *choice) less(other *choice) bool {
	if c.distance != other.distance {
		return c.distance < other.distance
	}
	if d := slices.Compare(c.after, other.after); d != 0 {
		return d < 0
	}
	return slices.Compare(c.plan, other.plan) > 0
}

// solve() searches the sets of NUMA nodes in the order of their size. A set of NUMA nodes is a solution if its costs from
// policyRules.before are as low as the costs for the set of all NUMA nodes. The search stops at the smallest size for which a solution
// exists. The result of solve() is the best solution of this size.
func (q *query) solve(r policyRules) []int {
	all, forced := make(nodeSet, len(q.distance)), make(nodeSet, len(q.distance))
	for pf, g := range q.pfs {
		all[g.node] = all[g.node] || len(q.free[pf]) > 0
		forced[g.node] = forced[g.node] || q.count[pf] > 0
	}
	s := search{query: q, policyRules: r, in: slices.Clone(forced)}
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
		s.trySets(0, extra)
	}
	switch {
	case s.best != nil:
		return s.best.plan
	case plan != nil:
		return plan
	}
	return s.growSet()
}

// The type search holds the state of the search for the best set of NUMA nodes.
type search struct {
	*query
	policyRules
	goal     []int
	in       nodeSet
	optional []int
	best     *choice
}

// trySets adds n NUMA nodes to the current set, in every possible combination, and tries each resulting set. trySets takes the n NUMA nodes
// from the list of optional nodes, starting at index i.
func (s *search) trySets(i, n int) {
	if s.budget <= 0 {
		return
	}
	if n == 0 {
		s.try()
		return
	}
	for ; i+n <= len(s.optional); i++ {
		s.in[s.optional[i]] = true
		s.trySets(i+1, n-1)
		s.in[s.optional[i]] = false
	}
}

func (s *search) try() {
	c := choice{distance: s.totalDistance()}
	s.budget -= len(s.pfs) + len(s.in)
	if s.freeDevices() < s.need || s.best != nil && c.distance > s.best.distance {
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

// growSet chooses the NUMA nodes after the search has used up its budget. growSet adds the NUMA node with the most free devices until the
// set has enough devices.
func (s *search) growSet() []int {
	free := make([]int, len(s.in))
	for pf, g := range s.pfs {
		free[g.node] += len(s.free[pf])
	}
	slices.SortStableFunc(s.optional, func(a, b int) int { return free[b] - free[a] })
	for _, i := range s.optional {
		if s.freeDevices() >= s.need {
			break
		}
		s.in[i] = true
	}
	return s.fill(s.query, s.in)
}

// freeDevices returns the number of free devices on the NUMA nodes of the set.
func (s *search) freeDevices() int {
	n := 0
	for pf, g := range s.pfs {
		if s.in[g.node] {
			n += len(s.free[pf])
		}
	}
	return n
}

// totalDistance returns the sum of the distances between all pairs of NUMA nodes in the set.
func (s *search) totalDistance() int {
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
