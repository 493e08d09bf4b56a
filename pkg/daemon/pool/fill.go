// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"container/heap"
	"slices"
)

// fillEvenly chooses one device after another. For each device, fillEvenly uses the PF with the most free devices.
func (q *query) fillEvenly(in nodeSet) []int {
	return q.fillOneByOne(in, func(int) int { return 0 }, func(int) {})
}

// fillSpread chooses one device after another. For each device, fillSpread uses the PF with the fewest chosen devices. Among PFs with the
// same number of chosen devices, fillSpread prefers a PF whose PCI root has the fewest chosen devices. If several PFs are still equal,
// fillSpread prefers a PF whose card has the fewest chosen devices.
func (q *query) fillSpread(in nodeSet) []int {
	roots, cards, pfs := q.countChosen(nil)
	order := func(pf int) int { return (pfs[pf]<<countBits+roots[q.pfs[pf].root])<<countBits + cards[q.pfs[pf].card] }
	return q.fillOneByOne(in, order, func(pf int) {
		roots[q.pfs[pf].root]++
		cards[q.pfs[pf].card]++
		pfs[pf]++
	})
}

// countBits is the number of bits for one count of devices in a combined integer. A combined integer contains several counts, so that one
// comparison of two integers compares all counts.
const countBits = 16

// fillOneByOne chooses one device after another. For each device, fillOneByOne uses the PF with the lowest rank. The rank of a PF consists
// of three parts: the result of the function in the argument "order", the number of free devices, and the address. A PF with more free
// devices has a lower rank. The rank of a PF never decreases while devices are chosen. The rank that the queue has stored for a PF is
// therefore never higher than the current rank. If the stored rank of the first PF is still current, this PF has the lowest rank of all
// PFs.
func (q *query) fillOneByOne(in nodeSet, order func(pf int) int, took func(pf int)) []int {
	plan := make([]int, len(q.pfs))
	rank := func(pf int) int { return order(pf)<<countBits - len(q.free[pf]) + plan[pf] }
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

// The type queue is a heap of PFs, sorted by rank.
type queue []turn

type turn struct{ rank, pf int }

func (l queue) Len() int { return len(l) }
func (l queue) Less(i, j int) bool {
	return l[i].rank < l[j].rank || l[i].rank == l[j].rank && l[i].pf < l[j].pf
}
func (l queue) Swap(i, j int) { l[i], l[j] = l[j], l[i] }

// Push implements heap.Interface. Package pool never calls Push.
func (l *queue) Push(v any) { *l = append(*l, v.(turn)) }

// Pop removes the last item of the queue.
func (l *queue) Pop() any {
	last := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return last
}

// countChosen counts the chosen devices of each PCI root, each card and each PF. The mandatory devices and the devices of the plan count as
// chosen devices.
func (q *query) countChosen(plan []int) (roots, cards, pfs []int) {
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
func (q *query) perPF(_ nodeSet, plan []int) []int {
	_, _, pfs := q.countChosen(plan)
	return descending(pfs)
}

// concentration() concatenates three lists: the number of chosen devices of each PCI root, the number of chosen devices of each card, and
// the result of leftPerPF. Each of the three lists is in descending order.
func (q *query) concentration(in nodeSet, plan []int) []int {
	roots, cards, _ := q.countChosen(plan)
	return slices.Concat(descending(roots), descending(cards), q.leftPerPF(in, plan))
}

// leftPerPF returns the number of devices that stay free on each PF, in descending order.
func (q *query) leftPerPF(_ nodeSet, plan []int) []int {
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

// pfsUsed returns the number of PFs that have devices in the plan or mandatory devices.
func (q *query) pfsUsed(_ nodeSet, plan []int) []int {
	used := 0
	for pf := range plan {
		if plan[pf]+q.count[pf] > 0 {
			used++
		}
	}
	return []int{used}
}

// leftOnPFs returns two numbers: how many devices stay free on the used PFs, and how many stay free on the used NUMA nodes.
func (q *query) leftOnPFs(in nodeSet, plan []int) []int {
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

// leftOnNodes returns three numbers: how many devices stay free on the used NUMA nodes, how many PFs are used, and how many devices stay
// free on the used PFs.
func (q *query) leftOnNodes(in nodeSet, plan []int) []int {
	left := q.leftOnPFs(in, plan)
	return []int{left[1], q.pfsUsed(in, plan)[0], left[0]}
}
