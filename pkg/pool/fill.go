// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"container/heap"
	"slices"
)

// evenly takes one device at a time from the PF with the most free devices.
func (q *query) evenly(in nodes) []int {
	return q.oneByOne(in, func(int) int { return 0 }, func(int) {})
}

// spreadOut takes one device at a time from the PF, PCI root and card with the fewest chosen devices.
func (q *query) spreadOut(in nodes) []int {
	roots, cards, pfs := q.tally(nil)
	order := func(pf int) int { return (pfs[pf]<<width+roots[q.pfs[pf].root])<<width + cards[q.pfs[pf].card] }
	return q.oneByOne(in, order, func(pf int) {
		roots[q.pfs[pf].root]++
		cards[q.pfs[pf].card]++
		pfs[pf]++
	})
}

// width is the number of bits for a count of devices, so that several counts can be packed into one comparable number.
const width = 16

// oneByOne takes each device from the PF with the lowest rank: order, then the most free devices, then the lowest address. A PF's rank
// never decreases. So the head of the queue is the minimum as soon as its own rank is up to date.
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

// Push implements heap.Interface. It is never called here.
func (l *queue) Push(v any) { *l = append(*l, v.(turn)) }

// Pop removes the last item.
func (l *queue) Pop() any {
	last := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return last
}

// tally counts the chosen devices behind each PCI root, on each card and on each PF.
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

// perPF returns the number of chosen devices of each PF, in descending order.
func (q *query) perPF(_ nodes, plan []int) []int {
	_, _, pfs := q.tally(plan)
	return descending(pfs)
}

// concentration returns the number of chosen devices of each PCI root, then of each card, both in descending order, and then the
// result of leftPerPF.
func (q *query) concentration(in nodes, plan []int) []int {
	roots, cards, _ := q.tally(plan)
	return slices.Concat(descending(roots), descending(cards), q.leftPerPF(in, plan))
}

// leftPerPF returns the number of devices left on each PF, in descending order.
func (q *query) leftPerPF(_ nodes, plan []int) []int {
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

// pfsUsed counts the PFs of a plan and of the mandatory devices.
func (q *query) pfsUsed(_ nodes, plan []int) []int {
	used := 0
	for pf := range plan {
		if plan[pf]+q.count[pf] > 0 {
			used++
		}
	}
	return []int{used}
}

// leftOnPFs counts the devices left on the PFs in use, then those left on the NUMA nodes.
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

// leftOnNodes counts the devices left on the NUMA nodes, then the PFs in use, then the devices left on these PFs.
func (q *query) leftOnNodes(in nodes, plan []int) []int {
	left := q.leftOnPFs(in, plan)
	return []int{left[1], q.pfsUsed(in, plan)[0], left[0]}
}
