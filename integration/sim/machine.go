// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/podlace/podlace/integration/kubeletnode"
	"github.com/podlace/podlace/pkg/cli/kubelet"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// topology is the number of NUMA nodes, PFs and VFs of a machine. Each NUMA node has equally many network cards.
type topology struct {
	nodes, pfs, vfs int // pfs near each node, vfs of each PF
	ports           int // PFs of a card
}

func parseTopology(s string, ports int) (topology, error) {
	t := topology{ports: ports}
	_, err := fmt.Sscanf(s, "%dx%dx%d", &t.nodes, &t.pfs, &t.vfs)
	switch {
	case err != nil || s != t.String():
		return t, fmt.Errorf("topology %q: want NODESxPFSxVFS as 2x2x16", s)
	case t.nodes < 1 || t.nodes > 8 || t.pfs < 1 || t.pfs > 16 || t.vfs < 1 || t.vfs > 127 || t.pfs*t.vfs < largest:
		return t, fmt.Errorf("topology %q: want at most 8 nodes, 16 PFs near each and 127 VFs of each PF, and at least %d VFs near each node", s,
			largest)
	case ports < 1 || ports > 8 || t.pfs%ports != 0:
		return t, fmt.Errorf("topology %q: want cards of 1 to 8 ports, and as many PFs as make whole cards", s)
	}
	return t, nil
}

func (t topology) String() string { return fmt.Sprintf("%dx%dx%d", t.nodes, t.pfs, t.vfs) }

// machine is a topology in the types of pkg/daemon/pool and pkg/cli/kubelet. VFs are numbered in the order of their PCI addresses.
type machine struct {
	topology
	pool   *pool.Topology
	ids    []string
	number map[string]int
	pf     []int // by VF
	node   []int // by VF
	near   []kubelet.Mask
	all    kubelet.Mask
}

func newMachine(t topology) (*machine, error) {
	m := &machine{topology: t, number: map[string]int{}}
	var s pci.Snapshot
	for node := range t.nodes {
		row := make([]int, t.nodes)
		for i := range row {
			row[i] = 20
		}
		row[node] = 10
		s.Nodes = append(s.Nodes, pci.Node{ID: node, Distance: row})
		m.all |= 1 << node
	}
	var p pool.Pool
	for pf := range t.nodes * t.pfs {
		devices, err := t.pfDevices(pf)
		if err != nil {
			return nil, err
		}
		s.Devices = append(s.Devices, devices...)
		for _, d := range devices[1:] {
			p.Devices = append(p.Devices, pool.Device{Device: d})
			m.number[d.Address.String()] = len(m.ids)
			m.ids = append(m.ids, d.Address.String())
			m.pf, m.node, m.near = append(m.pf, pf), append(m.node, d.NUMANode), append(m.near, 1<<d.NUMANode)
		}
	}
	m.pool = pool.NewTopology(p, &s)
	return m, nil
}

// pfDevices returns a PF and its VFs. Each card has its own PCI domain, and therefore its own PCIe root.
func (t topology) pfDevices(pf int) ([]pci.Device, error) {
	card, port := pf/t.ports, pf%t.ports
	var out []pci.Device
	for i := range 1 + t.vfs {
		n := port
		if i > 0 {
			n = 8 + port*128 + i - 1
		}
		address, err := pci.ParseAddress(fmt.Sprintf("%04x:%02x:%02x.%d", card, 16+n/256, n/8%32, n%8))
		if err != nil {
			return nil, err
		}
		d := pci.Device{Address: address, NUMANode: pf / t.pfs, Root: fmt.Sprintf("pci%04x:10", card), VFIndex: i - 1}
		if i > 0 {
			d.PF = out[0].Address
		}
		out = append(out, d)
	}
	return out, nil
}

// choiceMethod names a way of choosing VFs for a pod.
type choiceMethod string

const (
	random  choiceMethod = "random"  // the plugin has no preference, like sriov-network-device-plugin
	lexical choiceMethod = "lexical" // the first by address
)

// isOurs reports whether the method is a policy of pkg/daemon/pool. random and lexical are only for comparison.
func (a choiceMethod) isOurs() bool { return a != random && a != lexical }

func allocatorNames() []string {
	names := []string{string(random), string(lexical)}
	for _, p := range []pool.Policy{pool.NUMABestFit, pool.Pack, pool.Balance, pool.DistinctPF} {
		names = append(names, string(p))
	}
	return names
}

// preferFunc returns the function that chooses the preferred VFs, as the device plugin does for the kubelet.
func (m *machine) preferFunc(a choiceMethod) kubeletnode.Prefer {
	switch a {
	case random:
		return nil
	case lexical:
		return func(available, must []int, n int) []int {
			return first(append(append([]int{}, must...), difference(available, must)...), n)
		}
	}
	return func(available, must []int, n int) []int {
		chosen := pool.Prefer(pool.Policy(a), m.pool, m.names(available), m.names(must), n)
		out := make([]int, len(chosen))
		for i, id := range chosen {
			out[i] = m.number[id]
		}
		return out
	}
}

func (m *machine) names(vfs []int) []string {
	out := make([]string, len(vfs))
	for i, vf := range vfs {
		out[i] = m.ids[vf]
	}
	return out
}

// nodeCapacity returns how many VFs of a NUMA node can be in use at once, which CPUs may limit, because each VF needs some of the same
// node.
func (m *machine) nodeCapacity(cpus int) int {
	n := m.pfs * m.vfs
	if cpus > 0 {
		n = min(n, cpus/cpusPerVF)
	}
	return n
}

func (m *machine) label() string {
	return fmt.Sprintf("%d NUMA %s, %d %s each, %d VFs each", m.nodes, plural(m.nodes, "node"), m.pfs, plural(m.pfs, "PF"), m.vfs)
}

func plural(n int, s string) string { return s + strings.Repeat("s", min(1, n-1)) }
