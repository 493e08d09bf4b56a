// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/pci"
)

// TestPreferExamples shows the effect of each policy on a machine with two NUMA nodes, each with two cards of two ports with VFs 0-3.
func TestPreferExamples(t *testing.T) {
	var cards []card
	for i := range 4 {
		cards = append(cards, card{bus: 16 + i, node: i / 2, root: fmt.Sprint("r", i), ports: 2, vfs: 4})
	}
	s := newMachine(2, cards...)
	p := onePool(t, s)
	topology := NewTopology(p, s)
	name := func(id string) string { // card, port and VF
		a, _ := pci.ParseAddress(id)
		d, _ := s.Device(a)
		pf := d.PF.String()
		return fmt.Sprintf("%c%c%d", 'a'+pf[6]-'0', pf[11], d.VFIndex)
	}
	for _, test := range []struct {
		policy     Policy
		taken      string
		must, want string
		size       int
	}{
		{NUMABestFit, "", "", "a00", 1},
		{NUMABestFit, "c00", "", "c01", 1},                              // the node with the fewest free devices
		{NUMABestFit, "c00", "", "c01 c02", 2},                          // and on it the PF with the fewest
		{NUMABestFit, "a00 a01 b00 b01 b02", "", "a10 a11 a12", 3},      // one PF, although one of its devices stays free
		{NUMABestFit, "c00", "d13", "d10 d13", 2},                       // on the PF of the mandatory device
		{Pack, "c00 c01 a10", "", "c02 c03", 2},                         // the smallest PF that suffices
		{Pack, "c00 a10", "", "a00 a01 a02 a03", 4},                     // one PF, although other PFs are already in use
		{Pack, "a00 b00 c00 d00 a10 b10 c10", "", "d10 d11 d12 d13", 4}, // even on the other node
		// Two PFs of one node instead of the largest PF and another.
		{Pack, "a10 a11 a12 b00 b01 b02 b03 b10 b11 b12 b13 c00 c10 d00 d10", "", "c01 c02 c03 c11 c12 c13", 6},
		{Balance, "a00 c00 c10 c11 d00", "", "a10", 1},
		{Balance, "a00", "", "c00 c10", 2},            // the node with more free devices
		{Balance, "a00 c00", "a01", "a01 a10 b00", 3}, // a0 has the fewest free devices
		{DistinctPF, "", "", "a00 b00", 2},            // two cards instead of two ports of a card
		{DistinctPF, "a10", "", "c00 d00", 2},         // the node with more free devices
		{DistinctPF, "", "", "a00 a10 b00 b10", 4},    // two ports of a card instead of two nodes
		{DistinctPF, "", "", "a00 a10 b00 b10 c00 d00", 6},
		{DistinctPF, "", "b12", "a00 b12", 2},
	} {
		var available, must []string
		for _, d := range p.Devices {
			id := d.Address.String()
			if !strings.Contains(test.taken, name(id)) {
				available = append(available, id)
			}
			if strings.Contains(test.must, name(id)) {
				must = append(must, id)
			}
		}
		var got []string
		for _, id := range Prefer(test.policy, topology, available, must, test.size) {
			got = append(got, name(id))
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s of %d without %q, with %q: got %v, want %s", test.policy, test.size, test.taken, test.must, got, test.want)
		}
	}
}

// TestPreferNearNodes checks that VFs of several NUMA nodes are of near ones.
func TestPreferNearNodes(t *testing.T) {
	s := newMachine(4, card{bus: 16, node: 0, ports: 1, vfs: 4}, card{bus: 17, node: 1, ports: 1, vfs: 4},
		card{bus: 18, node: 2, ports: 1, vfs: 4}, card{bus: 19, node: 3, ports: 1, vfs: 5})
	s.Nodes[2].Distance[3], s.Nodes[3].Distance[2] = 12, 12
	p := onePool(t, s)
	for _, id := range Prefer(NUMABestFit, NewTopology(p, s), ids(p.Devices), nil, 7) {
		if !strings.HasPrefix(id, "0000:12") && !strings.HasPrefix(id, "0000:13") {
			t.Errorf("%s is on a distant node", id)
		}
	}
}

// TestPreferDoubts checks that Prefer returns a usable result for unusual arguments, such as unknown or repeated IDs.
func TestPreferDoubts(t *testing.T) {
	s := newMachine(2, card{bus: 16, node: 0, ports: 1, vfs: 2}, card{bus: 17, node: 1, ports: 1, vfs: 2})
	topology := NewTopology(onePool(t, s), s)
	const a0, a1, b0, b1 = "0000:10:01.0", "0000:10:01.1", "0000:11:01.0", "0000:11:01.1"
	for _, test := range []struct {
		available, must, want string
		size                  int
	}{
		{"", "", "", 1},
		{a1 + " " + a0, "", "", 0},
		{a1 + " " + a0, "", "", -1},
		{b0 + " " + a0, "", a0 + " " + b0, 3},                     // too few devices
		{b0 + " " + b0 + " " + a1, "", a1 + " " + b0, 2},          // a duplicate ID
		{a1, a0, a0, 1},                                           // no choice left
		{a1, a0 + " " + b1, a0 + " " + b1, 1},                     // more mandatory devices than the size
		{a1 + " eth9 0000:99:00.0 0000:0a:00.0 " + b0, "", a1, 1}, // unknown IDs come last
		{a1 + " eth9 0000:99:00.0 0000:0a:00.0 0000:99:00.0", "", a1 + " 0000:0a:00.0 0000:99:00.0 eth9", 4}, // sorted by address
		{a1 + " eth9 eth10 0000:99:00.0", "", a1 + " 0000:99:00.0 eth10 eth9", 9},
		{a1 + " " + b0 + " x", "x", a1 + " x", 2},
		{b0 + " " + a1 + " " + a0 + " " + b1 + " x", "x", a0 + " x", 2},
		{"x y", "x", "x y", 2},
		{"x " + a1, "x x", a1 + " x", 3},
	} {
		for _, policy := range []Policy{NUMABestFit, Pack, Balance, DistinctPF, "", "another"} {
			want := strings.Fields(test.want)
			got := Prefer(policy, topology, strings.Fields(test.available), strings.Fields(test.must), test.size)
			if !slices.Equal(got, want) {
				t.Errorf("%q of %q with %q, %d: got %v, want %v", policy, test.available, test.must, test.size, got, want)
			}
		}
	}
}

// TestPreferLarge checks that the result of Prefer is valid and close to the optimum on machines that are too large for a complete search.
func TestPreferLarge(t *testing.T) {
	for _, test := range []struct {
		nodes, perNode, vfs, size int // VFs of each PF; with 0 the PFs have 1, 2, 3 and so on
		policy                    Policy
		check                     func(pfs, nodes map[string]int) bool
	}{
		{16, 1, 4, 33, NUMABestFit, func(pfs, nodes map[string]int) bool { return len(nodes) == 9 }},
		{16, 1, 4, 33, Pack, func(pfs, nodes map[string]int) bool { return len(pfs) == 9 }},
		{12, 2, 8, 12, DistinctPF, func(pfs, nodes map[string]int) bool { return len(pfs) == 12 && len(nodes) == 6 }},
		{40, 1, 4, 80, DistinctPF, func(pfs, nodes map[string]int) bool { return len(pfs) == 40 }},
		{40, 1, 4, 81, Balance, func(pfs, nodes map[string]int) bool { return len(nodes) == 21 }},
		{20, 1, 0, 75, NUMABestFit, func(pfs, nodes map[string]int) bool { return len(nodes) == 5 }},
		{1, 120, 2, 131, Pack, func(pfs, nodes map[string]int) bool { return len(pfs) == 66 }},
	} {
		var cards []card
		for i := range test.nodes * test.perNode {
			cards = append(cards, card{bus: 16 + i, node: i / test.perNode, root: fmt.Sprint(i), ports: 1, vfs: cmp.Or(test.vfs, i+1)})
		}
		s := newMachine(test.nodes, cards...)
		p := onePool(t, s)
		got := Prefer(test.policy, NewTopology(p, s), ids(p.Devices), nil, test.size)
		pfs, nodes := map[string]int{}, map[string]int{}
		for _, id := range got {
			a, _ := pci.ParseAddress(id)
			d, ok := s.Device(a)
			if !ok || !d.IsVF() {
				t.Fatalf("%+v: %s is no VF", test, id)
			}
			pfs[d.PF.String()]++
			nodes[fmt.Sprint(d.NUMANode)]++
		}
		if slices.Sort(got); len(slices.Compact(got)) != test.size || !test.check(pfs, nodes) {
			t.Errorf("%d nodes, %d: %s: %d devices of PFs %v on nodes %v", test.nodes, test.size, test.policy, len(got), pfs, nodes)
		}
	}
}

// BenchmarkPrefer measures Prefer on machines with two and eight NUMA nodes. Each machine has 1,024 VFs, and half of the VFs are free.
func BenchmarkPrefer(b *testing.B) {
	for _, nodes := range []int{2, 8} {
		var cards []card
		for i := range 8 {
			cards = append(cards, card{bus: 16 + 4*i, node: i * nodes / 8, root: fmt.Sprint(i), ports: 2, vfs: 64})
		}
		s := newMachine(nodes, cards...)
		p := onePool(b, s)
		topology := NewTopology(p, s)
		free := ids(p.Devices)
		rng := rand.New(rand.NewPCG(1, 2))
		rng.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
		for _, policy := range []Policy{NUMABestFit, Pack, Balance, DistinctPF} {
			for _, size := range []int{1, 8, 200} {
				for _, available := range [][]string{free, free[:512]} {
					b.Run(fmt.Sprintf("nodes=%d/%s/size=%d/of=%d", nodes, policy, size, len(available)), func(b *testing.B) {
						for b.Loop() {
							Prefer(policy, topology, available, nil, size)
						}
					})
				}
			}
		}
	}
}
