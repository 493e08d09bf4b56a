// SPDX-License-Identifier: Apache-2.0

package kubelet

// Policy is a policy of the Topology Manager.
type Policy string

// These constants are the policies of the Topology Manager, with their names in the kubelet's configuration.
const (
	None       Policy = "none"
	BestEffort Policy = "best-effort"
	Restricted Policy = "restricted"
	SingleNUMA Policy = "single-numa-node"
)

// Merge merges the hints of several resources. The argument "lists" contains one list of hints for each resource. Merge selects the best
// combination with one hint from each list, and returns the merged hint. Merge also reports whether the policy admits the pod.
func Merge(p Policy, machine Mask, lists [][]Hint) (Hint, bool) {
	if p == None {
		return Hint{}, true
	}
	m := merger{machine: machine, lists: make([][]Hint, len(lists))}
	for i, hints := range lists {
		m.lists[i] = acceptableHints(p, hints)
	}
	m.enough = requiredNodes(m.lists)
	m.mergeFrom(0, Hint{machine, true}, 0)
	best := Hint{Nodes: machine}
	if m.best != nil {
		best = *m.best
	}
	if p == SingleNUMA && best.Nodes == machine {
		best.Nodes = 0
	}
	return best, p == BestEffort || best.Preferred
}

// acceptableHints replaces a nil or empty list by one hint for any node. For the policy single-numa-node, acceptableHints omits the hints
// that this policy never accepts.
func acceptableHints(p Policy, hints []Hint) []Hint {
	switch {
	case hints == nil:
		hints = []Hint{{0, true}}
	case len(hints) == 0:
		hints = []Hint{{0, false}}
	}
	if p != SingleNUMA {
		return hints
	}
	var out []Hint
	for _, h := range hints {
		if h.Preferred && h.Nodes.Count() <= 1 {
			out = append(out, h)
		}
	}
	return out
}

// requiredNodes computes the minimum number of NUMA nodes that each resource needs, and returns the largest of these numbers.
func requiredNodes(lists [][]Hint) int {
	most := 0
	for _, hints := range lists {
		fewest := 0
		for _, h := range hints {
			if n := h.Nodes.Count(); n > 0 && (fewest == 0 || n < fewest) {
				fewest = n
			}
		}
		most = max(most, fewest)
	}
	return most
}

type merger struct {
	machine Mask
	lists   [][]Hint
	enough  int
	best    *Hint
}

// mergeFrom merges a hint with the hints in list i and in all later lists. Each combination contains one hint from each of these lists. A
// combination of hints with different NUMA nodes is not preferred, even if each of its hints is preferred.
func (m *merger) mergeFrom(i int, merged Hint, first Mask) {
	if i == len(m.lists) {
		if merged.Nodes != 0 && m.isBetter(merged) {
			m.best = &merged
		}
		return
	}
	for _, h := range m.lists[i] {
		next, same := merged, first
		next.Preferred = next.Preferred && h.Preferred
		if h.Nodes != 0 {
			if same == 0 {
				same = h.Nodes
			}
			next.Nodes &= h.Nodes
			next.Preferred = next.Preferred && h.Nodes == same
		}
		m.mergeFrom(i+1, next, same)
	}
}

// isBetter reports whether a merged hint is better than the best hint so far. If neither hint is preferred, the best number of NUMA nodes
// is the number that requiredNodes returns.
func (m *merger) isBetter(h Hint) bool {
	if m.best == nil || h.Preferred != m.best.Preferred {
		return m.best == nil || h.Preferred
	}
	was, is := m.best.Nodes.Count(), h.Nodes.Count()
	switch {
	case h.Preferred || was > m.enough || was == is:
		return h.Nodes.isNarrower(m.best.Nodes)
	case is > m.enough:
		return false
	}
	return is > was
}
