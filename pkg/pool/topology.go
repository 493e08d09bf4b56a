// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

// Topology is the location of a pool's devices on NUMA nodes, cards and PFs. It is built once and serves any number of choices.
type Topology struct {
	rank     map[string]int // device ID to rank: sorted by the PF's address, then by VF index
	ids      []string       // by rank
	pfOf     []int          // by rank
	pfs      []group
	distance [][]int // between NUMA nodes, by index
}

// group is the devices of one PF in the pool. A device without a PF is its own group.
type group struct {
	node, root, card int // indexes
}

// unreachable is the distance of NUMA nodes for which the firmware reports none (ACPI SLIT).
const unreachable = 255

// NewTopology locates the devices of a pool. The ID of a device is its PCI address.
func NewTopology(p Pool, s *pci.Snapshot) *Topology {
	n := node{Snapshot: s}
	t := &Topology{rank: map[string]int{}}
	devices := slices.Clone(p.Devices)
	slices.SortFunc(devices, compareRank)
	nodes, roots, cards := indexes[int]{}, indexes[string]{}, indexes[string]{}
	ids := map[pfKey]int{}
	for i, d := range devices {
		key := pfKey{pfAddress(&d.Device), n.nodeOf(&d.Device)}
		pf, ok := ids[key]
		if !ok {
			pf = len(t.pfs)
			ids[key] = pf
			root, card := n.card(&d.Device)
			t.pfs = append(t.pfs, group{nodes.of(key.node), roots.of(root), cards.of(card)})
		}
		id := d.Address.String()
		t.rank[id], t.ids, t.pfOf = i, append(t.ids, id), append(t.pfOf, pf)
	}
	t.sortNodes(&n, nodes)
	return t
}

type pfKey struct {
	pf   pci.Address
	node int
}

func pfAddress(d *pci.Device) pci.Address {
	if d.IsVF() {
		return d.PF
	}
	return d.Address
}

func compareRank(a, b Device) int {
	return cmp.Or(pfAddress(&a.Device).Compare(pfAddress(&b.Device)), cmp.Compare(a.NUMANode, b.NUMANode),
		cmp.Compare(a.VFIndex, b.VFIndex), a.Address.Compare(b.Address))
}

// nodeOf returns the NUMA node of a device. On a machine with one node it is always unknown, because the node is irrelevant.
func (n *node) nodeOf(d *pci.Device) int {
	if n.multiNUMA() && n.nodeKnown(d) {
		return d.NUMANode
	}
	return pci.Unknown
}

// card returns the failure domains of a device: the root of the PCI hierarchy, and below it the card. The ports of a card are functions
// of one slot, or have the same switch ID.
func (n *node) card(d *pci.Device) (root, card string) {
	pf := d
	if found, ok := n.Device(d.PF); ok {
		pf = &found
	}
	slot, _, _ := strings.Cut(pfAddress(d).String(), ".")
	if pf.SwitchID != "" {
		return "switch " + pf.SwitchID, "switch " + pf.SwitchID
	}
	return cmp.Or(d.Root, slot), slot
}

// indexes numbers keys in order of appearance.
type indexes[T comparable] map[T]int

func (x indexes[T]) of(key T) int {
	if _, ok := x[key]; !ok {
		x[key] = len(x)
	}
	return x[key]
}

// sortNodes numbers the NUMA nodes by ID and stores their distances, summed over both directions.
func (t *Topology) sortNodes(n *node, nodes indexes[int]) {
	ids := make([]int, 0, len(nodes))
	for id := range nodes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	renumbered := make([]int, len(ids))
	for i, id := range ids {
		renumbered[nodes[id]] = i
		row := make([]int, len(ids))
		for j, other := range ids {
			row[j] = n.distance(id, other) + n.distance(other, id)
		}
		t.distance = append(t.distance, row)
	}
	for i := range t.pfs {
		t.pfs[i].node = renumbered[t.pfs[i].node]
	}
}

// distance returns the distance of two NUMA nodes in one direction.
func (n *node) distance(from, to int) int {
	index := func(id int) int { return slices.IndexFunc(n.Nodes, func(n pci.Node) bool { return n.ID == id }) }
	if i, j := index(from), index(to); i >= 0 && j >= 0 && j < len(n.Nodes[i].Distance) {
		return n.Nodes[i].Distance[j]
	}
	return unreachable
}
