// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
)

// fewestPFs first uses the PFs that already have chosen devices. If these PFs have too few devices, fewestPFs adds as few other PFs as
// possible. If several sets of PFs are equally small, fewestPFs uses the set that leaves the fewest devices unused.
func (q *query) fewestPFs(in nodeSet) []int {
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
		for _, pf := range q.smallestCover(others, need) {
			plan[pf] = len(q.free[pf])
		}
	}
	return dropSurplus(plan, q.need)
}

// dropSurplus reduces the number of devices in a plan to size. dropSurplus removes devices of the last PFs first.
func dropSurplus(plan []int, size int) []int {
	for pf, n := range plan {
		plan[pf] = min(n, size)
		size -= plan[pf]
	}
	return plan
}

// maxTable is the maximum number of bit sets in the table of subsetSum. Usually, the table of subsetSum has only a few bit sets.
const maxTable = 4096

// smallestCover returns the smallest set of PFs that together have enough devices. Among equally small sets, smallestCover prefers the set
// with the fewest additional devices, and then the set with the lowest PCI addresses.
func (q *query) smallestCover(pfs []int, need int) []int {
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

// subsetSum solves the subset-sum problem by dynamic programming. The table entry sums[i][n] is a set of sums. For each choice of n PFs
// with index i or higher, the set contains the number of devices that these PFs have together.
func subsetSum(pfs, sizes []int, count, need, most int) []int {
	sums, words := make([][]bitSet, len(pfs)+1), most/64+1
	table := make(bitSet, (len(pfs)+1)*(count+1)*words)
	for i := len(pfs); i >= 0; i-- {
		sums[i] = make([]bitSet, count+1)
		for n := range sums[i] {
			sums[i][n], table = table[:words:words], table[words:]
			if n == 0 {
				sums[i][n].set(0)
				continue
			}
			if i < len(pfs) {
				sums[i][n].addShifted(sums[i+1][n], 0)
				sums[i][n].addShifted(sums[i+1][n-1], sizes[i])
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

// largestFirst is a heuristic for hundreds of PFs. largestFirst chooses the largest PFs first. For the last devices, largestFirst chooses
// the smallest PF that has enough devices.
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

// bitSet is a set of small numbers.
type bitSet []uint64

func (b bitSet) set(n int)      { b[n/64] |= 1 << (n % 64) }
func (b bitSet) has(n int) bool { return b[n/64]>>(n%64)&1 == 1 }

// addShifted adds the second argument to each number of another set, and puts the sums into this set. addShifted drops numbers that exceed
// the size of the set.
func (b bitSet) addShifted(other bitSet, by int) {
	words, rest := by/64, by%64
	for i := len(b) - 1; i >= words; i-- {
		b[i] |= other[i-words] << rest
		if rest > 0 && i > words {
			b[i] |= other[i-words-1] >> (64 - rest)
		}
	}
}
