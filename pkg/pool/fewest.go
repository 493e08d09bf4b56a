// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
)

// fewestPFs uses PFs that already have devices among the chosen, and as few other PFs as possible. Of equally small sets it picks the one
// that leaves the fewest devices.
func (q *query) fewestPFs(in nodes) []int {
	plan := make([]int, len(q.pfs))
	var others []int
	need := q.need
	for pf, g := range q.pfs {
		switch {
		case !in[g.node] || len(q.free[pf]) == 0:
		case q.count[pf] > 0:
			plan[pf] = len(q.free[pf])
			need -= plan[pf]
		default:
			others = append(others, pf)
		}
	}
	if need > 0 {
		for _, pf := range q.covering(others, need) {
			plan[pf] = len(q.free[pf])
		}
	}
	return dropSurplus(plan, q.need)
}

// dropSurplus removes the surplus from the last PFs.
func dropSurplus(plan []int, size int) []int {
	for pf, n := range plan {
		plan[pf] = min(n, size)
		size -= plan[pf]
	}
	return plan
}

// maxTable bounds the table of subsetSum, in bit sets. Typical tables have a few.
const maxTable = 4096

// covering returns the smallest set of PFs with enough devices. Ties go to the smallest surplus, then to the lowest addresses.
func (q *query) covering(pfs []int, need int) []int {
	sizes := make([]int, len(pfs))
	for i, pf := range pfs {
		sizes[i] = len(q.free[pf])
	}
	largest := descending(slices.Clone(sizes))
	count, sum := 0, 0
	for sum < need {
		sum += largest[count]
		count++
	}
	if count == len(pfs) || largest[0] == largest[len(largest)-1] {
		return pfs[:count]
	}
	if count > 1 && (count+1)*(len(pfs)+1) > maxTable {
		return q.largestFirst(pfs, count, need)
	}
	q.budget -= (count + 1) * len(pfs) * (sum/64 + 2)
	return subsetSum(pfs, sizes, count, need, sum)
}

// subsetSum solves the subset-sum problem by dynamic programming: sums[i][n] is the set of sums of n PFs from index i on.
func subsetSum(pfs, sizes []int, count, need, most int) []int {
	sums, words := make([][]bits, len(pfs)+1), most/64+1
	table := make(bits, (len(pfs)+1)*(count+1)*words)
	for i := len(pfs); i >= 0; i-- {
		sums[i] = make([]bits, count+1)
		for n := range sums[i] {
			sums[i][n], table = table[:words:words], table[words:]
			if n == 0 {
				sums[i][n].set(0)
				continue
			}
			if i < len(pfs) {
				sums[i][n].or(sums[i+1][n], 0)
				sums[i][n].or(sums[i+1][n-1], sizes[i])
			}
		}
	}
	total := need
	for !sums[0][count].has(total) {
		total++
	}
	var chosen []int
	for i := range pfs {
		if n := count - len(chosen); n > 0 && total >= sizes[i] && sums[i+1][n-1].has(total-sizes[i]) {
			chosen = append(chosen, pfs[i])
			total -= sizes[i]
		}
	}
	return chosen
}

// largestFirst is a heuristic for hundreds of PFs: the largest ones, and as the last the smallest that suffices.
func (q *query) largestFirst(pfs []int, count, need int) []int {
	bySize := slices.Clone(pfs)
	slices.SortStableFunc(bySize, func(a, b int) int { return len(q.free[b]) - len(q.free[a]) })
	for _, pf := range bySize[:count-1] {
		need -= len(q.free[pf])
	}
	last := count - 1
	for i := count; i < len(bySize) && len(q.free[bySize[i]]) >= need; i++ {
		if len(q.free[bySize[i]]) < len(q.free[bySize[last]]) {
			last = i
		}
	}
	return append(bySize[:count-1:count-1], bySize[last])
}

// bits is a set of small numbers.
type bits []uint64

func (b bits) set(n int)      { b[n/64] |= 1 << (n % 64) }
func (b bits) has(n int) bool { return b[n/64]>>(n%64)&1 == 1 }

// or adds the numbers of another set, each increased by the given amount. Numbers beyond the set's size are dropped.
func (b bits) or(other bits, by int) {
	words, rest := by/64, by%64
	for i := len(b) - 1; i >= words; i-- {
		b[i] |= other[i-words] << rest
		if rest > 0 && i > words {
			b[i] |= other[i-words-1] >> (64 - rest)
		}
	}
}
