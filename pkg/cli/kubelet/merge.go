// SPDX-License-Identifier: Apache-2.0

package kubelet

// Policy is a policy of the Topology Manager.
type Policy string

// The policies of the Topology Manager, named as in the kubelet's configuration.
const (
	None       Policy = "none"
	BestEffort Policy = "best-effort"
	Restricted Policy = "restricted"
	SingleNUMA Policy = "single-numa-node"
)

// Merge combines one hint from each list, of which there is one for each resource, in the best way, and reports whether the policy admits
// the pod.
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

// acceptableHints replaces a nil or empty list by one hint for any node. For single-numa-node it omits the hints that this policy never
// accepts.
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

// requiredNodes returns the largest of the minimum numbers of NUMA nodes that the resources need.
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

// mergeFrom merges a hint with those in list i and all later lists, one from each. A combination of different NUMA nodes is not preferred,
// even if each of its hints is.
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

// isBetter reports whether a merged hint is better than the best so far. If neither is preferred, the best number of NUMA nodes is that of
// requiredNodes.
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
