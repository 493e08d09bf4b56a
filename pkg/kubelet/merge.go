// SPDX-License-Identifier: Apache-2.0

package kubelet

// Policy is one of the Topology Manager.
type Policy string

// The policies, by the names that the kubelet's configuration has for them.
const (
	None       Policy = "none"
	BestEffort Policy = "best-effort"
	Restricted Policy = "restricted"
	SingleNUMA Policy = "single-numa-node"
)

// Merge makes one hint out of a list for each resource, and says whether the pod may run. It takes one hint of each list in all ways there
// are.
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

// possible puts into words that a resource does not care or cannot be, and drops what single-numa-node never takes.
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

// enough returns how many nodes the neediest resource needs at least.
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

// walk takes a hint of each list from the ith on. Several that say different nodes are never preferred, even if each is.
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

// better compares with the best so far. Of hints that are not preferred the best has just as many nodes as the neediest resource needs.
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
