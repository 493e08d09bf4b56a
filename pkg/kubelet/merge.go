// SPDX-License-Identifier: Apache-2.0

package kubelet

// Policy is a policy of the Topology Manager.
type Policy string

// The policies, by their names in the kubelet's configuration.
const (
	None       Policy = "none"
	BestEffort Policy = "best-effort"
	Restricted Policy = "restricted"
	SingleNUMA Policy = "single-numa-node"
)

// Merge combines a list of hints for each resource into one hint, and reports whether the pod may run. It considers all combinations
// of one hint from each list.
func Merge(p Policy, machine Mask, lists [][]Hint) (Hint, bool) {
	if p == None {
		return Hint{}, true
	}
	m := merger{machine: machine, lists: make([][]Hint, len(lists))}
	for i, hints := range lists {
		m.lists[i] = possible(p, hints)
	}
	m.enough = enough(m.lists)
	m.walk(0, Hint{machine, true}, 0)
	best := Hint{Nodes: machine}
	if m.best != nil {
		best = *m.best
	}
	if p == SingleNUMA && best.Nodes == machine {
		best.Nodes = 0
	}
	return best, p == BestEffort || best.Preferred
}

// possible replaces nil and empty lists by explicit hints, and drops hints that single-numa-node never accepts.
func possible(p Policy, hints []Hint) []Hint {
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

// enough returns the minimum number of nodes of the resource that needs most.
func enough(lists [][]Hint) int {
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

// walk combines a hint of each list from index i on. Hints with different nodes are not preferred together, even if each is.
func (m *merger) walk(i int, merged Hint, first Mask) {
	if i == len(m.lists) {
		if merged.Nodes != 0 && m.better(merged) {
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
		m.walk(i+1, next, same)
	}
}

// better compares a hint with the best so far. The best hint that is not preferred has exactly as many nodes as the neediest resource
// needs.
func (m *merger) better(h Hint) bool {
	if m.best == nil || h.Preferred != m.best.Preferred {
		return m.best == nil || h.Preferred
	}
	was, is := m.best.Nodes.Count(), h.Nodes.Count()
	switch {
	case h.Preferred || was > m.enough || was == is:
		return h.Nodes.narrower(m.best.Nodes)
	case is > m.enough:
		return false
	}
	return is > was
}
