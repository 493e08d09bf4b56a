// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

// Topology is the NUMA node, the card and the PF of each device of a pool. Build it once for many calls of Prefer.
type Topology struct {
	*node
	rank map[string]int // device ID to its place among all devices, by the PF's address and then by VF index
	pfOf map[string]int // device ID to its PF in pfs
	pfs  []pfGroup
}

// pfGroup is the group of all devices of one PF and one NUMA node in the pool. A device without a PF has its own group.
type pfGroup struct {
	pf         pci.Address
	node       int
	root, card string
}

// unreachable is the distance between two NUMA nodes if the firmware reports none. In the ACPI SLIT, it means that no path exists.
const unreachable = 255

// NewTopology returns the topology of the devices of a pool. It uses the PCI addresses of the devices as their IDs.
func NewTopology(p Pool, s *pci.Snapshot) *Topology {
	t := &Topology{node: &node{Snapshot: s}, rank: map[string]int{}, pfOf: map[string]int{}}
	for i, d := range slices.SortedFunc(slices.Values(p.Devices), compareRank) {
		g := pfGroup{pf: pfAddress(&d.Device), node: t.nodeOf(&d.Device)}
		g.root, g.card = t.failureDomains(&d.Device)
		pf := slices.Index(t.pfs, g)
		if pf < 0 {
			pf, t.pfs = len(t.pfs), append(t.pfs, g)
		}
		id := d.Address.String()
		t.rank[id], t.pfOf[id] = i, pf
	}
	return t
}

// sorted returns the different IDs of a list, unknown ones last.
func (t *Topology) sorted(ids []string) []string {
	place := func(id string) int {
		if rank, ok := t.rank[id]; ok {
			return rank
		}
		return len(t.rank)
	}
	return slices.Compact(slices.SortedFunc(slices.Values(ids), func(a, b string) int {
		return cmp.Or(place(a)-place(b), strings.Compare(a, b))
	}))
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

// nodeOf returns the NUMA node of a device, or Unknown on a machine with only one, where it does not matter.
func (n *node) nodeOf(d *pci.Device) int {
	if n.multiNUMA() && n.nodeKnown(d) {
		return d.NUMANode
	}
	return pci.Unknown
}

// failureDomains returns a device's PCI root and card. Two ports are on the same card if they are functions of the same slot or have
// the same switch ID.
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

// distance returns the sum of the distances between two NUMA nodes in both directions.
func (n *node) distance(a, b int) int { return n.nodeDistance(a, b) + n.nodeDistance(b, a) }

// nodeDistance returns the distance from one NUMA node to another in one direction.
func (n *node) nodeDistance(from, to int) int {
	index := func(id int) int { return slices.IndexFunc(n.Nodes, func(n pci.Node) bool { return n.ID == id }) }
	if i, j := index(from), index(to); i >= 0 && j >= 0 && j < len(n.Nodes[i].Distance) {
		return n.Nodes[i].Distance[j]
	}
	return unreachable
}
