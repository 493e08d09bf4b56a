// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"maps"
	"slices"

	"github.com/podlace/podlace/pkg/pci"
)

// Pool contains the devices that a resource has on this node, and the name under which the kubelet knows the resource.
type Pool struct {
	Name     string    // with prefix: intel.com/sriov, intel.com/sriov_numa0
	Resource *Resource // configuration of the resource
	Devices  []Device  // sorted by address
}

// Device is a network device in a pool, with the additional properties that its resource defines.
type Device struct {
	pci.Device
	Topology []int             // NUMA nodes reported to the kubelet; empty if irrelevant or excluded
	RDMA     bool              // the container gets its RDMA device files
	VhostNet bool              // the container gets /dev/vhost-net and /dev/net/tun
	Info     map[string]string // from additionalInfo
	Port     string            // interface of the PF by which the selector names the device, if it names one
	Whole    int               // for a PF offered as a whole: number of VFs that it excludes
}

// Assign assigns each device to the first resource that matches it. Each resource gets a pool, even without devices, and with
// splitByNuma one for each NUMA node that has devices.
//
// On a machine with several NUMA nodes, devices with an unknown one get a separate pool, unless unknownNuma is "all" or the API is DRA.
// If only some devices of a resource have a topology, the kubelet's Topology Manager ignores the others and would refuse pods although
// devices are free.
func Assign(c *Config, s *pci.Snapshot, env Env) []Pool {
	n := newNode(s, env)
	members := make([][]Device, len(c.Resources))
	for _, v := range c.matchAll(n) {
		if v.resource >= 0 {
			members[v.resource] = append(members[v.resource], c.poolDevice(n, v))
		}
	}
	var pools []Pool
	for i := range c.Resources {
		if len(c.Resources[i].Unserved) == 0 {
			pools = append(pools, c.Resources[i].splitPools(n, members[i])...)
		}
	}
	return pools
}

// NumVFs returns the configured number of VFs for each PF of this node, from the first entry that matches it.
func (c *Config) NumVFs(s *pci.Snapshot) map[pci.Address]int {
	out := map[pci.Address]int{}
	for _, d := range newNode(s, Env{}).subjects {
		if i := c.entryOf(d); i >= 0 {
			out[d.Address] = c.PFs[i].NumVFs
		}
	}
	return out
}

// poolDevice returns the pool entry for a device, with the properties that its resource defines.
func (c *Config) poolDevice(n *node, v verdict) Device {
	r, d := &c.Resources[v.resource], Device{Device: n.Devices[v.device], Whole: c.excludedVFs(n.subjects[v.device])}
	switch {
	case r.ExcludeTopology || !n.multiNUMA():
	case n.nodeKnown(&d.Device):
		d.Topology = []int{d.NUMANode}
	case r.UnknownNUMA == unknownAll:
		for _, node := range n.Nodes {
			d.Topology = append(d.Topology, node.ID)
		}
	}
	if v.selector >= 0 {
		s := &r.Selectors[v.selector]
		d.RDMA, d.VhostNet, d.Port = s.RDMA, s.VhostNet, s.port(n.subjects[v.device])
	}
	for _, key := range []string{"*", d.Address.String()} {
		for k, value := range r.AdditionalInfo[key] {
			if d.Info == nil {
				d.Info = map[string]string{}
			}
			d.Info[k] = value
		}
	}
	return d
}

// splitPools returns the pools of a resource, usually one. Devices that need different suffixes get one each, the unknown NUMA node
// last.
func (r *Resource) splitPools(n *node, devices []Device) (out []Pool) {
	if r.API == DRA || !r.SplitByNUMA && !r.needsSuffix(n, devices) {
		return []Pool{{r.FullName(), r, devices}}
	}
	byNode := map[int][]Device{}
	for _, d := range devices {
		id := r.suffixNode(n, &d.Device)
		byNode[id] = append(byNode[id], d)
	}
	for _, id := range slices.Sorted(maps.Keys(byNode)) {
		suffix, special := map[int]string{noSuffix: "", unknownLast: noNUMA}[id]
		if !special {
			suffix = numaSuffix(id)
		}
		out = append(out, Pool{r.FullName() + suffix, r, byNode[id]})
	}
	return out
}

// Values of suffixNode that are no NUMA node.
const (
	noSuffix    = -1
	unknownLast = maxNode + 1
)

// suffixNode returns the NUMA node for the name of the pool to which a device belongs. A machine that reports no node has node 0.
func (r *Resource) suffixNode(n *node, d *pci.Device) int {
	switch {
	case !n.multiNUMA() && len(n.Nodes) == 1:
		return n.Nodes[0].ID
	case !n.multiNUMA():
		return 0
	case !n.nodeKnown(d):
		return unknownLast
	case r.SplitByNUMA:
		return d.NUMANode
	}
	return noSuffix
}

// needsSuffix reports whether devices with an unknown NUMA node need a separate pool. It returns false if the resource's name is too
// long for the suffix.
func (r *Resource) needsSuffix(n *node, devices []Device) bool {
	if !r.maySplit(noNUMA) || !n.multiNUMA() || len(r.Name)+len(noNUMA) > maxName {
		return false
	}
	located := 0
	for i := range devices {
		if n.nodeKnown(&devices[i].Device) {
			located++
		}
	}
	return located > 0 && located < len(devices)
}
