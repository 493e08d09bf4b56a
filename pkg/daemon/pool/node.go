// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
	"iter"
	"slices"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

// Env contains information about the node that a scan of the devices does not contain.
type Env struct {
	// DefaultRoute contains the names of the interfaces with a default route.
	DefaultRoute []string
	// InUse says of interfaces why the node itself may use them. A function without a PF may be its uplink or the path to its storage.
	InUse map[string]string
	// Held has the resource of each device that a pod has, or is nil if they are unknown. The interface of another function without a PF
	// must be here.
	Held map[pci.Address]string
	// Last has the attributes of each device as they were while its interface was on the node. Selectors use them while it is in a pod,
	// unless the driver has changed.
	Last map[pci.Address]pci.Device
}

// HeldBy returns Env.Held for the devices that pods have.
func HeldBy(devices iter.Seq[poddevices.Device]) map[pci.Address]string {
	held := map[pci.Address]string{}
	for d := range devices {
		if a, err := pci.ParseAddress(d.ID); err == nil {
			held[a] = cmp.Or(d.Resource, "a claim")
		}
	}
	return held
}

// node is a machine with its devices and the data that selectors need about each device.
type node struct {
	*pci.Snapshot
	env      Env
	subjects []subject // in the order of Devices
}

// subject is a device with the data that selectors compare.
type subject struct {
	pci.Device
	pf     *pci.Device // the PF of a VF, otherwise the device itself
	bindTo string      // driver that the resource binds devices to
	held   bool        // a pod has the device from the resource, and may have changed its driver or moved its RDMA device
}

// newNode returns the node of a snapshot. A device whose interface is in a pod has its attributes from env.Last.
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

// pfOf returns the PF of a VF. If the snapshot does not contain the PF, pfOf returns a device that has only an address.
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

// isFrom reports whether a pod has the device from the resource.
func (n *node) isFrom(r *Resource, a pci.Address) bool {
	parts := splitForm.FindStringSubmatch(n.env.Held[a])
	return n.env.Held[a] == r.FullName() || parts != nil && parts[1] == r.FullName() && r.maySplit(parts[2])
}

func (n *node) pfs(names func(subject) []string) (out []string) {
	for _, d := range n.subjects {
		if d.IsPF() {
			out = append(out, names(d)...)
		}
	}
	return out
}

func (n *node) isOnline(id int) bool {
	return slices.ContainsFunc(n.Nodes, func(n pci.Node) bool { return n.ID == id })
}

// multiNUMA reports whether the machine has more than one NUMA node. With a single one, the location of devices does not matter, and
// firmware often does not report it.
func (n *node) multiNUMA() bool { return len(n.Nodes) > 1 }

// nodeKnown reports whether the NUMA node of a device is known and online. The kubelet ignores NUMA nodes that are unknown or not online.
func (n *node) nodeKnown(d *pci.Device) bool { return n.isOnline(d.NUMANode) }

// If every resource must exclude a device, whyBusy returns the reason. Otherwise, whyBusy returns "".
func (c *Config) whyBusy(n *node, i int) string {
	d := &n.Devices[i]
	if !d.IsVF() {
		if why := c.whyReserved(n.subjects[i]); why != "" {
			return why
		}
	}
	if d.HasNoPF() {
		switch {
		case d.IsVirtio():
			return "the kernel does not say which interface of a pod belongs to a virtio card"
		case len(d.Interfaces) == 0 && d.Driver != "" && !pci.IsUserspace(d.Driver) && n.env.Held != nil && n.env.Held[d.Address] == "":
			return "its interface is in the network namespace of no pod that is known"
		}
		for _, name := range d.Interfaces {
			if why := n.env.InUse[name]; why != "" {
				return "its interface " + name + " " + why
			}
		}
	}
	return n.defaultRoute(d)
}

// whyReserved returns why pods must not get a function that is not a VF, or "". A pod that gets a PF could control all its VFs, so a PF
// needs offerWhole, or offerPf and no VFs. With vfio-pci, a PF cannot have VFs by default. A function with an unreadable file is not
// offered, because it may be a PF.
func (c *Config) whyReserved(d subject) string {
	var entry pfEntry
	if i := c.entryOf(d); i >= 0 {
		entry = c.PFs[i]
	}
	switch {
	case entry.Whole && d.Unreadable == "":
		return ""
	case d.NumVFs > 0:
		return "a PF with VFs"
	case entry.NumVFs > 0 && d.IsPF():
		return "a PF that will get VFs, as configured in " + entry.Key
	case d.Unreadable != "":
		return "it cannot be read: " + d.Unreadable
	case d.IsPF() && !entry.Offer:
		return fmt.Sprintf("a PF without VFs (it supports %d); to offer the PF itself, set offerPf in its entry of pfs", d.TotalVFs)
	}
	return ""
}

// entryOf returns the index of the first entry of the list pfs that matches a PF, or -1.
func (c *Config) entryOf(d subject) int {
	return slices.IndexFunc(c.PFs, func(pf pfEntry) bool { return pf.matches(d) })
}

func (n *node) defaultRoute(d *pci.Device) string {
	for _, name := range d.Interfaces {
		if slices.Contains(n.env.DefaultRoute, name) {
			return "its interface " + name + " carries a default route"
		}
	}
	return ""
}

// matches reports whether the entry of the list pfs identifies the given PF.
func (pf *pfEntry) matches(d subject) bool {
	if d.IsVF() {
		return false
	}
	return pf.Address.IsValid() && d.Address == pf.Address || pf.Name != "" && slices.Contains(d.Interfaces, pf.Name)
}
