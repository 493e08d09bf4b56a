// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

// Topology contains the NUMA node, the card and the PF of each device of a pool. Build a Topology once, and use it for many calls of
// Prefer.
type Topology struct {
	rank     map[string]int // device ID to rank: sorted by the PF's address, then by VF index
	ids      []string       // by rank
	pfOf     []int          // by rank
	pfs      []pfGroup
	distance [][]int // between NUMA nodes, by index
}

// The type pfGroup is the group of all devices of one PF and one NUMA node in the pool. A device without a PF has its own group.
type pfGroup struct {
	node, root, card int // indexes
}

// The constant "unreachable" is the distance between two NUMA nodes if the firmware reports no distance. In the ACPI SLIT, this value means
// that no path exists.
const unreachable = 255

// NewTopology returns the topology of the devices of a pool. NewTopology uses the PCI addresses of the devices as their IDs.
func NewTopology(p Pool, s *pci.Snapshot) *Topology {
	n := node{Snapshot: s}
	t := &Topology{rank: map[string]int{}}
	devices := slices.Clone(p.Devices)
	slices.SortFunc(devices, compareRank)
	nodes, roots, cards := indexMap[int]{}, indexMap[string]{}, indexMap[string]{}
	ids := map[pfKey]int{}
	for i, d := range devices {
		key := pfKey{pfAddress(&d.Device), n.nodeOf(&d.Device)}
		pf, ok := ids[key]
		if !ok {
			pf = len(t.pfs)
			ids[key] = pf
			root, card := n.failureDomains(&d.Device)
			t.pfs = append(t.pfs, pfGroup{nodes.of(key.node), roots.of(root), cards.of(card)})
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

// nodeOf returns the NUMA node of a device. On a machine with one NUMA node, nodeOf always returns Unknown, because the NUMA node of a
// device is irrelevant there.
func (n *node) nodeOf(d *pci.Device) int {
	if n.multiNUMA() && n.nodeKnown(d) {
		return d.NUMANode
	}
	return pci.Unknown
}

// failureDomains returns the PCI root of a device, and its card. Two ports belong to the same card if they are PCI functions of the same
// slot or have the same switch ID.
func (n *node) failureDomains(d *pci.Device) (root, card string) {
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

// The type indexMap assigns numbers to keys in the order in which the keys are first used.
type indexMap[T comparable] map[T]int

func (x indexMap[T]) of(key T) int {
	if _, ok := x[key]; !ok {
		x[key] = len(x)
	}
	return x[key]
}

// sortNodes assigns an index to each NUMA node, in the order of the nodes' IDs. sortNodes also stores the distances between the nodes. Each
// stored distance is the sum of the distances in both directions.
func (t *Topology) sortNodes(n *node, nodes indexMap[int]) {
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
			row[j] = n.nodeDistance(id, other) + n.nodeDistance(other, id)
		}
		t.distance = append(t.distance, row)
	}
	for i := range t.pfs {
		t.pfs[i].node = renumbered[t.pfs[i].node]
	}
}

// nodeDistance returns the distance from one NUMA node to another in one direction.
func (n *node) nodeDistance(from, to int) int {
	index := func(id int) int { return slices.IndexFunc(n.Nodes, func(n pci.Node) bool { return n.ID == id }) }
	if i, j := index(from), index(to); i >= 0 && j >= 0 && j < len(n.Nodes[i].Distance) {
		return n.Nodes[i].Distance[j]
	}
	return unreachable
}
