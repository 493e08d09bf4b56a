// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"slices"
	"testing"

	"github.com/podlace/podlace/pkg/pci"
)

func pciAddr(bus, device, function int) pci.Address {
	a, err := pci.ParseAddress(fmt.Sprintf("0000:%02x:%02x.%d", bus, device, function))
	if err != nil {
		panic(err)
	}
	return a
}

type card struct {
	bus, node  int
	root       string
	switchID   string
	ports, vfs int // vfs is the number of VFs of each port
	vendor     string
	driver     string // of the VFs
	name       string // interface name of the ports, without their number
	reversed   bool   // VFs are numbered from the highest address down
}

// newMachine returns a snapshot of a machine with the NUMA nodes 0 to n-1 and the PFs and VFs of the given cards.
func newMachine(n int, cards ...card) *pci.Snapshot {
	s := &pci.Snapshot{}
	for i := range n {
		row := make([]int, n)
		for j := range row {
			row[j] = 20
		}
		row[i] = 10
		s.Nodes = append(s.Nodes, pci.Node{ID: i, Distance: row})
	}
	for _, c := range cards {
		for port := range c.ports {
			s.Devices = append(s.Devices, c.portDevices(port)...)
		}
	}
	slices.SortFunc(s.Devices, func(a, b pci.Device) int { return a.Address.Compare(b.Address) })
	return s
}

func (c card) portDevices(port int) []pci.Device {
	pf := pci.Device{Address: pciAddr(c.bus, 0, port), Vendor: c.vendor, Product: "1592", Class: 0x020000, Driver: "ice", NUMANode: c.node,
		Root:       c.root,
		IOMMUGroup: pci.Unknown, LinkType: pci.Ether, VFIndex: pci.Unknown, TotalVFs: 64, NumVFs: c.vfs, SwitchID: c.switchID}
	if c.name != "" {
		pf.Interfaces = []string{fmt.Sprintf("%s%d", c.name, port)}
	}
	out := []pci.Device{pf}
	for i := range c.vfs {
		n := port*128 + i + 8
		vf := pci.Device{Address: pciAddr(c.bus+n/256, n/8%32, n%8), Vendor: c.vendor, Product: "1889", Class: 0x020000, Driver: c.driver,
			NUMANode: c.node,
			Root:     c.root, IOMMUGroup: pci.Unknown, LinkType: pci.Ether, PF: pf.Address, VFIndex: i}
		if c.reversed {
			vf.VFIndex = c.vfs - 1 - i
		}
		out = append(out, vf)
	}
	return out
}

func onePool(t testing.TB, s *pci.Snapshot) Pool {
	t.Helper()
	c, err := Parse(Source{File: "config.json", Prefix: "intel.com"}, []byte(`{"resourceList":[{"resourceName":"vf","unknownNuma":"all"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	return Assign(c, s, Env{})[0]
}

func ids(devices []Device) []string {
	out := make([]string, len(devices))
	for i, d := range devices {
		out[i] = d.Address.String()
	}
	return out
}
