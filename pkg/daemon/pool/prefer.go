// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

// Prefer chooses the given number of devices for a container. Prefer chooses all mandatory devices, and then available devices until the
// number is reached. Each policy minimises a list of quantities, in this order:
//
//	numa-best-fit  NUMA nodes, their distance, devices left on the nodes, PFs, devices left on the PFs
//	pack           PFs, NUMA nodes, their distance, devices left on the PFs, devices left on the nodes
//	balance        NUMA nodes, their distance, the most devices left on a PF, then on the next
//	distinct-pf    the most devices of one PF, then of the next, NUMA nodes, their distance, the most devices behind one
//	               PCI root, then behind the next, the same for cards, the most devices left on a PF, then on the next
//
// The distance of a set of NUMA nodes is the sum of the distances of all pairs of nodes. Among equally good devices, Prefer chooses the
// device with the lowest address. Inside a PF, Prefer chooses the device with the lowest VF index. The result of Prefer therefore does not
// depend on the order of the arguments. The result of Prefer is optimal unless the search over all sets of NUMA nodes exceeds its budget.
// On machines with ten or more NUMA nodes or hundreds of devices, the search can exceed its budget. If the search exceeds its budget,
// another result with fewer NUMA nodes may exist.
//
// Prefer returns no error, because an error would make the pod fail. Prefer uses unknown IDs only if too few known devices are available.
// If too few devices are available, Prefer returns all available devices.
func Prefer(policy Policy, t *Topology, available, must []string, size int) []string {
	q := newQuery(t, available, must)
	switch q.need = size - len(q.must) - len(q.mustUnknown); {
	case q.need <= 0:
		return q.selectIDs(nil, 0)
	case q.need >= q.countKnown():
		plan := make([]int, len(t.pfs))
		for pf := range plan {
			plan[pf] = len(q.free[pf])
		}
		return q.selectIDs(plan, q.need-q.countKnown())
	}
	return q.selectIDs(q.solve(rulesOf(policy)), 0)
}

// The type query is the input of one call of Prefer.
type query struct {
	*Topology
	free        [][]int // ranks by PF
	count       []int   // mandatory devices by PF
	must        []int   // ranks of the mandatory devices
	unknown     []string
	mustUnknown []string
	need        int
	budget      int // remaining work, in units of about 10 ns
}

func newQuery(t *Topology, available, must []string) *query {
	q := &query{Topology: t, free: make([][]int, len(t.pfs)), count: make([]int, len(t.pfs)), budget: 1 << 15}
	const offered, demanded = 1, 2
	state := make([]byte, len(t.ids))
	mark := func(ids []string, as byte, unknown *[]string) {
		for _, id := range ids {
			if rank, ok := t.rank[id]; ok {
				state[rank] = as
			} else {
				*unknown = append(*unknown, id)
			}
		}
		slices.SortFunc(*unknown, compareID)
		*unknown = slices.Compact(*unknown)
	}
	mark(available, offered, &q.unknown)
	mark(must, demanded, &q.mustUnknown)
	q.unknown = slices.DeleteFunc(q.unknown, func(id string) bool { return slices.Contains(q.mustUnknown, id) })
	for rank, s := range state {
		switch pf := t.pfOf[rank]; s {
		case offered:
			q.free[pf] = append(q.free[pf], rank)
		case demanded:
			q.must = append(q.must, rank)
			q.count[pf]++
		}
	}
	return q
}

// compareID compares device IDs by PCI address. IDs that are not PCI addresses come after all PCI addresses.
func compareID(a, b string) int {
	x, errX := pci.ParseAddress(a)
	y, errY := pci.ParseAddress(b)
	switch {
	case errX == nil && errY == nil && x != y:
		return x.Compare(y)
	case errX == nil && errY != nil:
		return -1
	case errX != nil && errY == nil:
		return 1
	}
	return strings.Compare(a, b)
}

// countKnown returns the number of available devices that the topology contains.
func (q *query) countKnown() int {
	n := 0
	for _, free := range q.free {
		n += len(free)
	}
	return n
}

// selectIDs returns the IDs of the mandatory devices, and of the first free devices of each PF according to the plan. selectIDs also
// returns unknown IDs. The last argument of selectIDs is the maximum number of unknown IDs.
func (q *query) selectIDs(plan []int, unknown int) []string {
	ranks := slices.Clone(q.must)
	for pf, n := range plan {
		ranks = append(ranks, q.free[pf][:n]...)
	}
	slices.Sort(ranks)
	out := make([]string, 0, len(ranks)+len(q.mustUnknown)+len(q.unknown))
	for _, rank := range ranks {
		out = append(out, q.ids[rank])
	}
	out = append(out, q.mustUnknown...)
	return append(out, q.unknown[:min(unknown, len(q.unknown))]...)
}
