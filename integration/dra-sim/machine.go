// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// machine is a node with SR-IOV network cards. Each NUMA node has nearly the same number of PFs.
type machine struct {
	name  string
	numa  int // NUMA nodes
	pfs   int
	vfs   int // VFs of each PF
	blind int // number of PFs without a known NUMA node
}

// defaultConfig offers all VFs by DRA, those of every second PF as example.com/slow.
const defaultConfig = `{"resourceList": [
  {"resourceName": "slow", "api": "dra", "vf": {"maxTxRate": 1000}, "selectors": {"pfNames": ["ens1f0", "ens3f0", "ens5f0", "ens7f0"]}},
  {"resourceName": "fast", "api": "dra", "vf": {"trust": "on"}, "claimMay": ["mac", "ips", "ifName", "mtu", {"vlan": "100-199"}]}]}`

// parseDefaultConfig returns the parsed defaultConfig.
func parseDefaultConfig() (*pool.Config, error) { return parseConfig(defaultConfig) }

func parseConfig(config string) (*pool.Config, error) {
	return pool.Parse(pool.Source{File: "config.json", Prefix: "example.com", Host: "node"}, []byte(config))
}

// snapshot returns the PCI devices of the machine, like a scan of sysfs.
func (m machine) snapshot() *pci.Snapshot {
	s := &pci.Snapshot{}
	for n := range m.numa {
		s.Nodes = append(s.Nodes, pci.Node{ID: n, CPUs: fmt.Sprintf("%d-%d", 16*n, 16*n+15)})
	}
	for p := range m.pfs {
		node := pci.Unknown
		if m.numa > 0 && p >= m.blind {
			node = p % m.numa
		}
		s.Devices = append(s.Devices, m.cardDevices(p, node)...)
	}
	slices.SortFunc(s.Devices, func(a, b pci.Device) int { return a.Address.Compare(b.Address) })
	return s
}

// cardDevices returns the PCI devices of a PF and its VFs. Each PF and its VFs have their own PCI buses.
func (m machine) cardDevices(p, node int) []pci.Device {
	bus := 0x10 + 4*p
	address := func(function int) pci.Address {
		a, err := pci.ParseAddress(fmt.Sprintf("0000:%02x:%02x.%d", bus+function/256, function/8%32, function%8))
		if err != nil {
			panic(err) // the scenario is invalid
		}
		return a
	}
	pf := pci.Device{Address: address(0), Vendor: "8086", Product: "1592", Class: 0x020000, Driver: "ice", NUMANode: node,
		Root: fmt.Sprintf("pci0000:%02x", bus), IOMMUGroup: pci.Unknown, Interfaces: []string{fmt.Sprintf("ens%df0", p)}, LinkType: pci.Ether,
		VFIndex: pci.Unknown, TotalVFs: max(m.vfs, 1), NumVFs: m.vfs, Carrier: true}
	devices := []pci.Device{pf}
	for v := range m.vfs {
		vf := pf
		vf.Address, vf.PF, vf.VFIndex, vf.Product, vf.Driver = address(8+v), pf.Address, v, "1889", "iavf"
		vf.Interfaces, vf.TotalVFs, vf.NumVFs = []string{fmt.Sprintf("ens%df0v%d", p, v)}, 0, 0
		devices = append(devices, vf)
	}
	return devices
}

// inventory returns the inventory that the daemon would build on the machine.
func (m machine) inventory(c *pool.Config) dra.Inventory {
	s := m.snapshot()
	i := dra.Inventory{Snapshot: s, Pools: pool.Assign(c, s, pool.Env{}), Taints: c.Taints, Faults: map[string]dra.Fault{},
		Held: map[string]string{}}
	for _, n := range s.Nodes {
		i.Nodes = append(i.Nodes, n.ID)
	}
	return i
}

// publishedSlices returns the ResourceSlices that the API server would store. Kubernetes' library for DRA drivers names them.
func publishedSlices(node string, i dra.Inventory) (out []*resourceapi.ResourceSlice) {
	all := dra.Resources(i, node, nil, time.Unix(1_800_000_000, 0)).Pools[node].Slices
	for n, s := range all {
		out = append(out, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s-x7k2p", n, claim.Driver, node)},
			Spec: resourceapi.ResourceSliceSpec{Driver: claim.Driver, NodeName: &node, Devices: s.Devices, SharedCounters: s.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: int64(len(all))}}})
	}
	return out
}

// randomMachine returns a machine with random properties within the bounds of real hardware.
func randomMachine(r *rand.Rand) machine {
	m := machine{name: fmt.Sprintf("node-%d.example.com", r.IntN(1000)), numa: r.IntN(5), pfs: r.IntN(9), vfs: 1 + r.IntN(16)}
	if r.IntN(10) == 0 {
		m.vfs = []int{63, 64, 65, 127, 128}[r.IntN(5)]
	}
	if m.pfs > 0 {
		m.blind = r.IntN(m.pfs)
	}
	return m
}
