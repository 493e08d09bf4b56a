// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"container/heap"
	"slices"
)

// evenly takes one device after the other from the PF that has the most.
func (q *query) evenly(in nodes) []int {
	return q.oneByOne(in, func(int) int { return 0 }, func(int) {})
}

// apart takes one device after the other from where the fewest are taken: on a PF, behind a PCI root, on a card.
func (q *query) apart(in nodes) []int {
	roots, cards, pfs := q.tally(nil)
	order := func(pf int) int { return (pfs[pf]<<width+roots[q.pfs[pf].root])<<width + cards[q.pfs[pf].card] }
	return q.oneByOne(in, order, func(pf int) {
		roots[q.pfs[pf].root]++
		cards[q.pfs[pf].card]++
		pfs[pf]++
	})
}

// width is that of a number of devices, so that several make one number that can be compared.
const width = 16

// oneByOne takes from the PF that comes first in an order, of equal ones that with the most left, of those that with the lowest address. A
// PF may only move back in the order: so the first of the queue is the first of all as soon as its own rank is up to date.
func (q *query) oneByOne(in nodes, order func(pf int) int, took func(pf int)) []int {
	plan := make([]int, len(q.pfs))
	rank := func(pf int) int { return order(pf)<<width - len(q.free[pf]) + plan[pf] }
	var line queue
	for pf, g := range q.pfs {
		if in[g.node] && len(q.free[pf]) > 0 {
			line = append(line, turn{rank(pf), pf})
		}
	}
	heap.Init(&line)
	for need := q.need; need > 0; {
		q.budget -= 8
		pf := line[0].pf
		if now := rank(pf); now != line[0].rank {
			line[0].rank = now
			heap.Fix(&line, 0)
			continue
		}
		plan[pf]++
		took(pf)
		need--
		if plan[pf] == len(q.free[pf]) {
			heap.Pop(&line)
		}
	}
	return plan
}

// queue is a heap of PFs.
type queue []turn

type turn struct{ rank, pf int }

func (l queue) Len() int { return len(l) }
func (l queue) Less(i, j int) bool {
	return l[i].rank < l[j].rank || l[i].rank == l[j].rank && l[i].pf < l[j].pf
}
func (l queue) Swap(i, j int) { l[i], l[j] = l[j], l[i] }

// Push is there for package heap alone, which never needs it here.
func (l *queue) Push(v any) { *l = append(*l, v.(turn)) }

// Pop drops the last.
func (l *queue) Pop() any {
	last := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return last
}

// tally counts the devices behind each root, on each card and on each PF.
func (q *query) tally(plan []int) (roots, cards, pfs []int) {
	roots, cards, pfs = make([]int, len(q.pfs)), make([]int, len(q.pfs)), make([]int, len(q.pfs))
	for pf, g := range q.pfs {
		n := q.count[pf]
		if plan != nil {
			n += plan[pf]
		}
		roots[g.root] += n
		cards[g.card] += n
		pfs[pf] += n
	}
	return roots, cards, pfs
}

// sharing returns how many devices share a PF, the most first.
func (q *query) sharing(_ nodes, plan []int) []int {
	_, _, pfs := q.tally(plan)
	return descending(pfs)
}

// concentration returns how many devices share a root, then a card, the most first, and then the levels.
func (q *query) concentration(in nodes, plan []int) []int {
	roots, cards, _ := q.tally(plan)
	return slices.Concat(descending(roots), descending(cards), q.levels(in, plan))
}

// levels returns how many devices are left on the PFs, the most first.
func (q *query) levels(_ nodes, plan []int) []int {
	left := make([]int, len(q.pfs))
	for pf := range left {
		left[pf] = len(q.free[pf]) - plan[pf]
	}
	return descending(left)
}

func descending(n []int) []int {
	slices.Sort(n)
	slices.Reverse(n)
	return n
}

// pfsUsed counts the PFs of a plan and of what must be.
func (q *query) pfsUsed(_ nodes, plan []int) []int {
	used := 0
	for pf := range plan {
		if plan[pf]+q.count[pf] > 0 {
			used++
		}
	}
	return []int{used}
}

// leftOnPFs counts the devices left on the PFs used, then those on the nodes.
func (q *query) leftOnPFs(in nodes, plan []int) []int {
	onPFs, onNodes := 0, 0
	for pf, g := range q.pfs {
		left := len(q.free[pf]) - plan[pf]
		if plan[pf]+q.count[pf] > 0 {
			onPFs += left
		}
		if in[g.node] {
			onNodes += left
		}
	}
	return []int{onPFs, onNodes}
}

// leftOnNodes counts the devices left on the nodes, then the PFs used and the devices left on them.
func (q *query) leftOnNodes(in nodes, plan []int) []int {
	left := q.leftOnPFs(in, plan)
	return []int{left[1], q.pfsUsed(in, plan)[0], left[0]}
}
