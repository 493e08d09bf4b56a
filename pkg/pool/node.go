// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/pci"
)

// Env is what a scan of the devices does not tell.
type Env struct {
	// DefaultRoute names the interfaces that carry a default route.
	DefaultRoute []string
	// Last is how devices were when they had their interface in the host. It says what their interface would while that is in a pod, as long
	// as the driver is the same.
	Last map[pci.Address]pci.Device
}

// node is a machine as selectors see it.
type node struct {
	*pci.Snapshot
	env      Env
	subjects []subject // in the order of Devices
}

// subject is a device that selectors look at.
type subject struct {
	pci.Device
	pf     *pci.Device // of a VF; otherwise the device itself
	bindTo string      // the driver of the resource
}

// newNode prepares the devices: what an interface in a pod hides is taken from the past.
func newNode(s *pci.Snapshot, env Env) *node {
	n := &node{s, env, make([]subject, len(s.Devices))}
	for i, d := range s.Devices {
		if last, ok := env.Last[d.Address]; ok && last.Driver == d.Driver && len(d.Interfaces) == 0 {
			d.Interfaces = last.Interfaces
			if d.LinkType == "" {
				d.LinkType = last.LinkType
			}
			if len(d.RDMA) == 0 {
				d.RDMA, d.RDMAFiles = last.RDMA, last.RDMAFiles
			}
		}
		n.subjects[i].Device = d
	}
	for i := range n.subjects {
		n.subjects[i].pf = n.pfOf(&n.subjects[i].Device)
	}
	return n
}

// pfOf returns the PF of a VF, if only with its address where the scan does not have it.
func (n *node) pfOf(d *pci.Device) *pci.Device {
	if !d.IsVF() {
		return d
	}
	if i, ok := n.index(d.PF); ok {
		return &n.subjects[i].Device
	}
	return &pci.Device{Address: d.PF}
}

func (n *node) index(a pci.Address) (int, bool) {
	return slices.BinarySearchFunc(n.subjects, a, func(d subject, a pci.Address) int { return d.Address.Compare(a) })
}

// pfs returns the names of all PFs.
func (n *node) pfs(names func(subject) []string) (out []string) {
	for _, d := range n.subjects {
		if !d.IsVF() && d.TotalVFs > 0 {
			out = append(out, names(d)...)
		}
	}
	return out
}

// online reports whether the machine has a NUMA node.
func (n *node) online(id int) bool {
	return slices.ContainsFunc(n.Nodes, func(n pci.Node) bool { return n.ID == id })
}

// several reports whether the machine has more than one NUMA node. With one it does not matter where devices are, and firmware often does
// not say.
func (n *node) several() bool { return len(n.Nodes) > 1 }

// located reports whether the NUMA node of a device is known and one that the kubelet knows, too.
func (n *node) located(d *pci.Device) bool { return n.online(d.NUMANode) }

// busy returns why a device can be in no resource, "" if it can.
func (c *Config) busy(n *node, i int) string {
	d := &n.Devices[i]
	if !d.IsVF() {
		if why := c.reserved(n.subjects[i]); why != "" {
			return why
		}
	}
	return n.defaultRoute(d)
}

// reserved returns why a function that is no VF stays with the node, "" if a pod may have it. A PF is a device only while it has no VFs and
// its entry of pfs has offerPf, or offerWhole: a pod that has a PF controls all its VFs, and a PF with VFIO can have none. An unreadable
// function may be a PF.
func (c *Config) reserved(d subject) string {
	var entry pfEntry
	if i := c.entryOf(d); i >= 0 {
		entry = c.PFs[i]
	}
	switch {
	case entry.Whole && d.Unreadable == "":
		return ""
	case d.NumVFs > 0:
		return "a PF with VFs"
	case entry.NumVFs > 0:
		return "a PF that is to get VFs, by " + entry.Key
	case d.Unreadable != "":
		return "it cannot be read: " + d.Unreadable
	case d.TotalVFs > 0 && !entry.Offer:
		return fmt.Sprintf("a PF without VFs, of which it can have %d; only offerPf in its entry of pfs makes the PF itself a device", d.TotalVFs)
	}
	return ""
}

// entryOf returns the entry of pfs that counts for a PF, the first, or -1.
func (c *Config) entryOf(d subject) int {
	return slices.IndexFunc(c.PFs, func(pf pfEntry) bool { return pf.is(d) })
}

func (n *node) defaultRoute(d *pci.Device) string {
	for _, name := range d.Interfaces {
		if slices.Contains(n.env.DefaultRoute, name) {
			return "its interface " + name + " carries a default route"
		}
	}
	return ""
}

// is reports whether a device is the PF that is meant.
func (pf *pfEntry) is(d subject) bool {
	if d.IsVF() {
		return false
	}
	return pf.Address.IsValid() && d.Address == pf.Address || pf.Name != "" && slices.Contains(d.Interfaces, pf.Name)
}
