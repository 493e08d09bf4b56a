// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/podlace/podlace/pkg/pci"
)

// TestPreferIsOptimal compares Prefer with all subsets of devices: none has lower costs, and none on the same NUMA nodes has lower
// costs there.
func TestPreferIsOptimal(t *testing.T) {
	for _, policy := range []Policy{NUMABestFit, Pack, Balance, DistinctPF} {
		for seed := range uint64(2000) {
			c := randomCase(seed)
			got := Prefer(policy, c.topology, c.available, c.must, c.size)
			c.checkOptimal(t, seed, got, func(chosen []string) []int { return c.costOf(policy, chosen) })
			c.available = slices.DeleteFunc(c.available, func(id string) bool {
				return !slices.ContainsFunc(got, func(other string) bool { return c.node(c.of[id]) == c.node(c.of[other]) })
			})
			c.checkOptimal(t, seed, got, func(chosen []string) []int { return c.costOnNodes(policy, chosen) })
		}
	}
}

func (c randomQuery) checkOptimal(t *testing.T, seed uint64, got []string, costs func([]string) []int) {
	t.Helper()
	if want := c.bestSubset(costs); len(got) != len(want) || slices.Compare(costs(got), costs(want)) > 0 {
		t.Fatalf("seed %d: of %v, with %v, %d wanted\n got %v %v\nwant %v %v", seed, c.available, c.must, c.size, got, costs(got), want,
			costs(want))
	}
}

// TestPreferAsksNoOrder checks that Prefer returns the same for any order of its arguments, and does not change them.
func TestPreferAsksNoOrder(t *testing.T) {
	for seed := range uint64(200) {
		c := randomCase(seed)
		for _, policy := range []Policy{NUMABestFit, Pack, Balance, DistinctPF} {
			want := Prefer(policy, c.topology, c.available, c.must, c.size)
			rng := rand.New(rand.NewPCG(seed, 1))
			available, must := slices.Clone(c.available), slices.Clone(c.must)
			rng.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
			rng.Shuffle(len(must), func(i, j int) { must[i], must[j] = must[j], must[i] })
			asked := slices.Clone(available)
			got := Prefer(policy, NewTopology(shuffled(c.pool, rng), c.snapshot), available, must, c.size)
			if !slices.Equal(got, want) || !slices.Equal(available, asked) {
				t.Fatalf("%s, seed %d: %v, in another order %v", policy, seed, want, got)
			}
		}
	}
}

func shuffled(p Pool, rng *rand.Rand) Pool {
	p.Devices = slices.Clone(p.Devices)
	rng.Shuffle(len(p.Devices), func(i, j int) { p.Devices[i], p.Devices[j] = p.Devices[j], p.Devices[i] })
	return p
}

// randomQuery is a random machine with random arguments for Prefer.
type randomQuery struct {
	snapshot        *pci.Snapshot
	pool            Pool
	topology        *Topology
	available, must []string
	size            int
	of              map[string]pci.Device
}

// randomCase returns a random machine with at most four NUMA nodes and twelve VFs. A card's devices may be on several NUMA nodes or an
// unknown one.
func randomCase(seed uint64) randomQuery {
	rng := rand.New(rand.NewPCG(seed, 0))
	count := 1 + rng.IntN(4)
	var cards []card
	for i, left := 0, 3+rng.IntN(10); left > 0; i++ {
		c := card{bus: 16 + i, node: rng.IntN(count+1) - rng.IntN(2), root: string(rune('a' + rng.IntN(3))), ports: 1 + rng.IntN(2),
			vfs: 1 + rng.IntN(4), reversed: rng.IntN(4) == 0}
		if c.node == count {
			c.node = 0
		}
		if rng.IntN(4) == 0 {
			c.switchID = "s" + string(rune('a'+rng.IntN(2)))
		}
		c.vfs = min(c.vfs, left)
		c.ports = min(c.ports, max(1, left/c.vfs))
		left -= c.ports * c.vfs
		cards = append(cards, c)
	}
	c := randomQuery{snapshot: newMachine(count, cards...), of: map[string]pci.Device{}}
	for i := range c.snapshot.Nodes {
		for j := range i {
			c.snapshot.Nodes[i].Distance[j], c.snapshot.Nodes[j].Distance[i] = 11+rng.IntN(3), 11+rng.IntN(3)
		}
	}
	for _, d := range c.snapshot.Devices {
		if c.of[d.Address.String()] = d; d.IsVF() {
			c.pool.Devices = append(c.pool.Devices, Device{Device: d})
		}
	}
	c.topology = NewTopology(c.pool, c.snapshot)
	for _, id := range ids(c.pool.Devices) {
		switch n := rng.IntN(10); {
		case n < 7:
			c.available = append(c.available, id)
			if n == 0 {
				c.must = append(c.must, id)
			}
		case n == 7:
			c.must = append(c.must, id) // the kubelet may demand a device that is not in the available list
		}
	}
	all := len(c.allIDs())
	c.size = len(c.must) + rng.IntN(all-len(c.must)+1)
	return c
}

// allIDs returns all available and mandatory devices, sorted by PF and VF index.
func (c randomQuery) allIDs() []string {
	all := slices.Concat(c.available, c.must)
	slices.SortFunc(all, func(a, b string) int {
		x, y := c.of[a], c.of[b]
		if x.PF != y.PF {
			return x.PF.Compare(y.PF)
		}
		return x.VFIndex - y.VFIndex
	})
	return slices.Compact(all)
}

// bestSubset tries all subsets of devices and returns one with the lowest costs.
func (c randomQuery) bestSubset(costs func([]string) []int) []string {
	all := c.allIDs()
	var best []string
	var lowest []int
	var try func(i int, chosen []string)
	try = func(i int, chosen []string) {
		if len(chosen) == c.size {
			if slices.ContainsFunc(all[i:], func(id string) bool { return slices.Contains(c.must, id) }) {
				return
			}
			if cost := costs(chosen); best == nil || slices.Compare(cost, lowest) < 0 {
				best, lowest = slices.Clone(chosen), cost
			}
			return
		}
		if i == len(all) {
			return
		}
		try(i+1, append(chosen, all[i]))
		if !slices.Contains(c.must, all[i]) {
			try(i+1, chosen)
		}
	}
	if try(0, make([]string, 0, len(all))); best == nil {
		return []string{}
	}
	return best
}

// costOf returns the quantities that a policy minimises first, as Prefer documents them.
func (c randomQuery) costOf(policy Policy, chosen []string) []int {
	nodes := map[int]int{}
	for _, id := range chosen {
		nodes[c.node(c.of[id])]++
	}
	switch perPF := c.perPF(chosen); policy {
	case Pack:
		return []int{len(perPF)}
	case DistinctPF:
		if len(c.must) > 0 { // of which one PF may have several
			return sortedValues(perPF)[:1]
		}
		return []int{sortedValues(perPF)[0], len(nodes)}
	}
	return []int{len(nodes)}
}

// costOnNodes returns the quantities that a policy minimises on the chosen NUMA nodes.
func (c randomQuery) costOnNodes(policy Policy, chosen []string) []int {
	switch policy {
	case Balance:
		return sortedValues(c.perPF(slices.DeleteFunc(c.allIDs(), func(id string) bool { return slices.Contains(chosen, id) })))
	case DistinctPF:
		return sortedValues(c.perPF(chosen))
	}
	return []int{len(c.perPF(chosen))}
}

func (c randomQuery) perPF(chosen []string) map[string]int {
	pfs := map[string]int{}
	for _, id := range chosen {
		pfs[c.of[id].PF.String()]++
	}
	return pfs
}

func sortedValues[K comparable](m map[K]int) []int {
	out := append(slices.Collect(maps.Values(m)), make([]int, 12-len(m))...)
	slices.Sort(out)
	slices.Reverse(out)
	return out
}

func (c randomQuery) node(d pci.Device) int {
	if len(c.snapshot.Nodes) == 1 {
		return 0
	}
	return d.NUMANode
}
