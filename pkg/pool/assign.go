// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"

	"github.com/podlace/podlace/pkg/pci"
)

// Pool is a resource as the kubelet sees it, with its devices on this node.
type Pool struct {
	Name     string    // prefix and name: intel.com/sriov, intel.com/sriov_numa0
	Resource *Resource // that it was made from
	Devices  []Device  // sorted by address
}

// Device is a device in a pool.
type Device struct {
	pci.Device
	Topology []int             // the NUMA nodes that it is near to; none if it is all the same or must not be told
	RDMA     bool              // goes with its RDMA files
	VhostNet bool              // goes with /dev/vhost-net and /dev/net/tun
	Info     map[string]string // of additionalInfo
	Whole    int               // of a PF that is offered whole: how many VFs it excludes
}

// Assign gives each device to the first resource that matches. A resource has a pool even without devices, unless it is split: then there
// is a pool for each NUMA node with devices. On a machine with several nodes, devices whose node is unknown do not share a pool with others
// unless unknownNuma is "all", or claims choose: the Topology Manager counts only devices that have a topology, if any of the resource has
// one, and refuses pods although some are free.
func Assign(c *Config, s *pci.Snapshot, env Env) []Pool {
	n := newNode(s, env)
	members := make([][]Device, len(c.Resources))
	for _, v := range c.judge(n, false) {
		if v.resource >= 0 {
			members[v.resource] = append(members[v.resource], c.device(n, v))
		}
	}
	var pools []Pool
	for i := range c.Resources {
		if len(c.Resources[i].Unserved) == 0 {
			pools = append(pools, c.Resources[i].pools(n, members[i])...)
		}
	}
	return pools
}

// NumVFs returns how many VFs the PFs of this node shall have. If two entries mean one PF, the first counts.
func (c *Config) NumVFs(s *pci.Snapshot) map[pci.Address]int {
	out := map[pci.Address]int{}
	for _, d := range newNode(s, Env{}).subjects {
		if i := c.entryOf(d); i >= 0 {
			out[d.Address] = c.PFs[i].NumVFs
		}
	}
	return out
}

// device returns what a device is offered as.
func (c *Config) device(n *node, v verdict) Device {
	r, d := &c.Resources[v.resource], Device{Device: n.Devices[v.device], Whole: c.whole(n.subjects[v.device])}
	switch {
	case r.ExcludeTopology || !n.several():
	case n.located(&d.Device):
		d.Topology = []int{d.NUMANode}
	case r.UnknownNUMA == unlocatedAll:
		for _, node := range n.Nodes {
			d.Topology = append(d.Topology, node.ID)
		}
	}
	if v.selector >= 0 {
		d.RDMA, d.VhostNet = r.Selectors[v.selector].RDMA, r.Selectors[v.selector].VhostNet
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

// pools splits the devices of a resource by what their names end in.
func (r *Resource) pools(n *node, devices []Device) []Pool {
	if r.API == DRA || !r.SplitByNUMA && !r.mixed(n, devices) {
		return []Pool{{r.FullName(), r, devices}}
	}
	var out []Pool
	for _, d := range devices {
		name := r.FullName() + r.ending(n, &d.Device)
		i := slices.IndexFunc(out, func(p Pool) bool { return p.Name == name })
		if i < 0 {
			i, out = len(out), append(out, Pool{Name: name, Resource: r})
		}
		out[i].Devices = append(out[i].Devices, d)
	}
	slices.SortFunc(out, func(a, b Pool) int { return r.order(n, a) - r.order(n, b) })
	return out
}

// order sorts the pools of a resource by NUMA node, those of none last.
func (r *Resource) order(n *node, p Pool) int {
	if d := &p.Devices[0].Device; n.located(d) {
		return d.NUMANode
	}
	return maxNode + 1
}

// ending returns what the pool of a device has after the name of its resource.
func (r *Resource) ending(n *node, d *pci.Device) string {
	switch {
	case !n.several() && r.SplitByNUMA:
		return ofNUMA(n.only())
	case !n.located(d):
		return noNUMA
	case r.SplitByNUMA:
		return ofNUMA(d.NUMANode)
	}
	return ""
}

// only returns the NUMA node of a machine with one.
func (n *node) only() int {
	if len(n.Nodes) == 1 {
		return n.Nodes[0].ID
	}
	return 0
}

// mixed reports whether devices must be kept apart because the node of some is unknown. Names that have no room for an ending stay as they
// are.
func (r *Resource) mixed(n *node, devices []Device) bool {
	if !r.splits(noNUMA) || !n.several() || len(r.Name)+len(noNUMA) > maxName {
		return false
	}
	located := 0
	for i := range devices {
		if n.located(&devices[i].Device) {
			located++
		}
	}
	return located > 0 && located < len(devices)
}
