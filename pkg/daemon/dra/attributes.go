// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// Attributes of devices. Attribute names without a domain belong to the domain of the driver.
const (
	attrResource  = "resource"
	attrKind      = "kind"
	attrPF        = "pf"
	attrPFAddress = "pfAddress"
	attrCard      = "card"
	attrVF        = "vf"
	attrNUMA      = "numa"
	attrVendor    = "vendor"
	attrProduct   = "product"
	attrDriver    = "driver"
	attrLinkType  = "linkType"
	attrRDMA      = "rdma"

	// Older DRA drivers for CPUs and networks publish attrOldNUMA too, so that a claim can require the NUMA node of their devices for
	// VFs.
	attrOldNUMA = "dra.net/numaNode"
	// Multus reads the following two attributes.
	attrMultusDevice   = "k8s.cni.cncf.io/deviceID"
	attrMultusResource = "k8s.cni.cncf.io/resourceName"

	kindVF   = "vf"
	kindPF   = "pf"
	kindNoPF = "no-pf" // neither a VF with its PF on the node nor a PF
)

// DeviceName returns the name of a PCI function in ResourceSlices. A device name is a DNS label such as 0000-3b-10-2.
func DeviceName(a pci.Address) string {
	return strings.NewReplacer(":", "-", ".", "-").Replace(a.String())
}

// attributesOf returns the attributes of a device in a ResourceSlice. They must not change while the card is plugged in, because every
// scheduler would receive the whole slice again. Every device has all of them, except numaNode if unknown: if a CEL expression reads a
// missing attribute, the scheduler stops with an error for the whole cluster.
func (i Inventory) attributesOf(resource string, d pool.Device) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	pf := i.pfOf(d.Device)
	rdma := len(d.Device.RDMA) > 0
	if last, ok := i.Last[d.Address]; ok && last.Driver == d.Driver && len(d.Interfaces) == 0 {
		rdma = rdma || len(last.RDMA) > 0
		d.LinkType = cmp.Or(d.LinkType, last.LinkType)
	}
	driver, kind, pfName := d.Driver, kindOf(d.Device), i.pfName(pf)
	if kind == kindNoPF {
		pfName = d.Address.String()
	}
	if r := i.resourceNamed(resource); r != nil {
		driver = driverOf(r, d.Device)
	}
	id := d.Address.String()
	out := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		deviceattribute.StandardDeviceAttributePCIBusID: text(id),
		deviceattribute.StandardDeviceAttributePCIeRoot: text(d.Root),
		attrMultusDevice:   text(id),
		attrMultusResource: text(resource),
		attrResource:       text(resource),
		attrKind:           text(kind),
		attrPF:             text(pfName),
		attrPFAddress:      text(pf.Address.String()),
		attrCard:           text(i.cardAddress(pf)),
		attrVF:             number(d.VFIndex),
		attrNUMA:           number(d.NUMANode),
		attrVendor:         text(d.Vendor),
		attrProduct:        text(d.Product),
		attrDriver:         text(driver),
		attrLinkType:       text(d.LinkType),
		attrRDMA:           {BoolValue: &rdma},
	}
	if d.NUMANode >= 0 && slices.Contains(i.Nodes, d.NUMANode) {
		out[deviceattribute.StandardDeviceAttributeNUMANode] = number(d.NUMANode)
		out[attrOldNUMA] = number(d.NUMANode)
	}
	return out
}

func kindOf(d pci.Device) string {
	switch {
	case d.IsVF():
		return kindVF
	case d.HasNoPF():
		return kindNoPF
	}
	return kindPF
}

// driverOf returns the driver that a device has while its resource waits for a pod.
func driverOf(r *pool.Resource, d pci.Device) string {
	if d.IsPF() { // the daemon does not change it
		return d.Driver
	}
	return cmp.Or(r.Driver, d.Driver)
}

func text(s string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{StringValue: &s}
}

func number(n int) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{IntValue: new(int64(n))}
}

// resourceNamed returns the resource that has the given name. It returns nil if the resource was removed from the configuration.
func (i Inventory) resourceNamed(name string) *pool.Resource {
	for _, p := range i.Pools {
		if p.Name == name {
			return p.Resource
		}
	}
	return nil
}

// pfOf returns the PF of a VF, or the device itself if it is no VF. If the scan did not find the PF, only its address is set.
func (i Inventory) pfOf(d pci.Device) pci.Device {
	if !d.IsVF() {
		return d
	}
	if pf, ok := i.Snapshot.Device(d.PF); ok {
		return pf
	}
	return pci.Device{Address: d.PF}
}

// pfName returns the current or last known interface name of a PF. If neither name is known, pfName returns the PF's address.
func (i Inventory) pfName(pf pci.Device) string {
	if len(pf.Interfaces) == 0 {
		pf = i.Last[pf.Address]
	}
	if len(pf.Interfaces) == 0 {
		return pf.Address.String()
	}
	return pf.Interfaces[0]
}

// cardAddress returns the address of a card's first PF without the function number, which is the same for all its PFs. In switchdev
// mode, a card may have several PCI devices, which share a switch ID.
func (i Inventory) cardAddress(pf pci.Device) string {
	first := pf.Address
	if pf.SwitchID != "" {
		for _, d := range i.Snapshot.Devices {
			if d.SwitchID == pf.SwitchID && !d.IsVF() && d.Address.Compare(first) < 0 {
				first = d.Address
			}
		}
	}
	card, _, _ := strings.Cut(first.String(), ".")
	return card
}
