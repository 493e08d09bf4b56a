// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
)

// Prefer chooses devices for a container: all mandatory ones, and then available ones until there are as many as wanted.
//
//	numa-best-fit  the fewest NUMA nodes, and on them the fewest PFs
//	pack           the fewest PFs
//	balance        the fewest NUMA nodes, and on them always the PF with the most free devices
//	distinct-pf    as few devices of each PF as possible, for that the fewest NUMA nodes, and on them always the PF, then
//	               the PCI root, then the card with the fewest chosen devices
//
// Of several NUMA nodes or PFs that are enough, the first two policies take the one with the fewest free devices, which keeps large groups
// free, and the other two the one with the most.
//
// These are greedy choices: the number of nodes and PFs is the lowest possible, but another choice may be nearer or leave larger groups.
// Ties go to the lowest address and VF index, so the order of the arguments does not matter.
//
// Prefer returns no error, because an error would make the pod fail. It uses IDs that the pool does not know only if there are too few
// others, and returns all available devices if they are too few.
func Prefer(policy Policy, t *Topology, available, must []string, size int) []string {
	c := choice{Topology: t, chosen: t.sorted(must), free: make([][]string, len(t.pfs)), taken: make([]int, len(t.pfs))}
	c.need = size - len(c.chosen)
	for _, id := range c.chosen {
		if pf, ok := t.pfOf[id]; ok {
			c.taken[pf]++
		}
	}
	var unknown []string
	for _, id := range t.sorted(available) {
		pf, ok := t.pfOf[id]
		switch {
		case slices.Contains(c.chosen, id):
		case ok:
			c.free[pf] = append(c.free[pf], id)
		default:
			unknown = append(unknown, id)
		}
	}
	c.choose(policy)
	return t.sorted(append(c.chosen, unknown[:max(0, min(c.need, len(unknown)))]...))
}

// choice is the state of one call of Prefer. PFs are numbers.
type choice struct {
	*Topology
	chosen []string
	need   int        // number of devices still to choose
	taken  []int      // number of chosen devices of each PF
	free   [][]string // the other devices of each PF
}

func (c *choice) takenOf(pf int) int { return c.taken[pf] }
func (c *choice) freeOf(pf int) int  { return len(c.free[pf]) }

func (c *choice) choose(policy Policy) {
	used := func(pf int) int { return -c.freeOf(pf) }
	all := c.those(func(pfGroup) bool { return true })
	switch policy {
	case Pack:
		c.fill(c.onFewestNodes(c.freeOf, c.freeOf), all)
	case Balance:
		c.spread(c.onFewestNodes(c.freeOf, used), func(int) []int { return nil })
	case DistinctPF:
		most := 1
		room := func(pf int) int { return max(0, min(c.freeOf(pf), most-c.taken[pf])) }
		for need := min(c.need, sum(all, c.freeOf)); sum(all, room) < need; {
			most++
		}
		c.spread(c.onFewestNodes(room, used), c.concentration)
	default:
		c.fill(c.onFewestNodes(c.freeOf, c.freeOf))
	}
}

// concentration returns how many devices of a PF, of its PCI root and of its card are chosen.
func (c *choice) concentration(pf int) []int {
	root := c.those(func(g pfGroup) bool { return g.root == c.pfs[pf].root })
	card := c.those(func(g pfGroup) bool { return g.card == c.pfs[pf].card })
	return []int{c.taken[pf], sum(root, c.takenOf), sum(card, c.takenOf)}
}

// onFewestNodes returns the PFs of as few NUMA nodes as have room for the needed devices.
func (c *choice) onFewestNodes(room, fit func(pf int) int) []int {
	var nodes []int
	for _, g := range c.pfs {
		nodes = append(nodes, g.node)
	}
	slices.Sort(nodes)
	on := func(count func(pf int) int) func(node int) int {
		return func(node int) int { return sum(c.those(func(g pfGroup) bool { return g.node == node }), count) }
	}
	nodes = fewest(slices.Compact(nodes), c.need, on(c.takenOf), on(room), on(fit), c.distance)
	return c.those(func(g pfGroup) bool { return slices.Contains(nodes, g.node) })
}

// fill takes the devices of as few PFs as possible, from the first list that allows so few.
func (c *choice) fill(lists ...[]int) {
	distance := func(a, b int) int { return c.distance(c.pfs[a].node, c.pfs[b].node) }
	for i := range lists {
		lists[i] = fewest(lists[i], c.need, c.takenOf, c.freeOf, c.freeOf, distance)
	}
	for _, pf := range slices.MinFunc(lists, func(a, b []int) int { return len(a) - len(b) }) {
		for c.need > 0 && c.freeOf(pf) > 0 {
			c.take(pf)
		}
	}
}

// spread takes one device after another from the PF with the lowest costs, and of several from the one with the most free devices.
func (c *choice) spread(pfs []int, costs func(pf int) []int) {
	for c.need > 0 {
		pfs = slices.DeleteFunc(pfs, func(pf int) bool { return c.freeOf(pf) == 0 })
		if len(pfs) == 0 {
			return
		}
		c.take(slices.MinFunc(pfs, func(a, b int) int {
			return slices.Compare(append(costs(a), -c.freeOf(a)), append(costs(b), -c.freeOf(b)))
		}))
	}
}

func (c *choice) take(pf int) {
	c.chosen, c.free[pf] = append(c.chosen, c.free[pf][0]), c.free[pf][1:]
	c.taken[pf]++
	c.need--
}

func (c *choice) those(accepts func(pfGroup) bool) (out []int) {
	for pf, g := range c.pfs {
		if accepts(g) {
			out = append(out, pf)
		}
	}
	return out
}

// fewest returns as few NUMA nodes or PFs as have room for the needed devices. Those with chosen devices come first. Then it adds the
// largest until one more is enough, and as the last one the nearest of those that are enough, and of these the one with the lowest fit.
func fewest(groups []int, need int, taken, room, fit func(int) int, distance func(a, b int) int) (out []int) {
	costs := func(g int) []int {
		far := sum(out, func(other int) int { return distance(g, other) })
		switch {
		case taken(g) > 0:
			return []int{0}
		case room(g) >= need:
			return []int{1, far, fit(g)}
		}
		return []int{2, -room(g), far}
	}
	for len(groups) > 0 {
		next := slices.MinFunc(groups, func(a, b int) int { return slices.Compare(costs(a), costs(b)) })
		if need <= 0 && taken(next) == 0 {
			break
		}
		out, need = append(out, next), need-room(next)
		groups = slices.DeleteFunc(groups, func(g int) bool { return g == next })
	}
	return out
}

func sum(groups []int, count func(int) int) (n int) {
	for _, g := range groups {
		n += count(g)
	}
	return n
}
