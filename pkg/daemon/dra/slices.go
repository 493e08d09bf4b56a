// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

const (
	// maxDevices is the limit for a slice with taints or counters. It applies to all slices, because any may get taints later.
	maxDevices = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	// maxCounterSets is the maximum number of counter sets in a slice. Each PF that is offered as a whole has one counter set.
	maxCounterSets = resourceapi.ResourceSliceMaxCounterSets

	counterVFs = "vfs"
)

// sliceFeatures says which optional fields the API server stores. An API server drops the fields of disabled features.
type sliceFeatures struct{ taints, counters bool }

// desiredState contains all input from which the driver computes the slices.
type desiredState struct {
	Inventory
	node    string
	records []claim.Record
	former  map[string]resourceapi.Device // by name: devices as last published
	now     time.Time
	sliceFeatures

	excluded map[pci.Address]int // number of VFs that each PF offered as a whole excludes
}

// driverResources returns the node's slices, the same for each order of the input. They form one pool, and none has devices of two PFs.
func (d desiredState) driverResources() *resourceslice.DriverResources {
	d.excluded = d.wholePFs()
	var out []resourceslice.Slice
	if d.counters {
		out = counterSlices(d.excluded)
	}
	devices := d.allDevices()
	slices.SortFunc(devices, compareDevices)
	for len(devices) > 0 {
		n := 0
		for n < len(devices) && n < maxDevices && pfAddress(devices[n]) == pfAddress(devices[0]) {
			n++
		}
		out, devices = append(out, resourceslice.Slice{Devices: devices[:n:n]}), devices[n:]
	}
	if len(out) == 0 {
		out = append(out, resourceslice.Slice{})
	}
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.node: {Slices: out}}}
}

// compareDevices compares devices by NUMA node (unknown last), then PF, then VF index, with a PF after its VFs. The scheduler takes the
// first device that fits.
func compareDevices(a, b resourceapi.Device) int {
	compare := func(name resourceapi.QualifiedName) int { // -1 becomes the largest number
		return cmp.Compare(uint64(*a.Attributes[name].IntValue), uint64(*b.Attributes[name].IntValue))
	}
	return cmp.Or(compare(attrNUMA), strings.Compare(pfAddress(a), pfAddress(b)), compare(attrVF),
		strings.Compare(a.Name, b.Name))
}

func pfAddress(d resourceapi.Device) string { return *d.Attributes[attrPFAddress].StringValue }

// allDevices returns all devices to publish, in no particular order.
func (d desiredState) allDevices() (out []resourceapi.Device) {
	prepared := d.claimedResources()
	seen := map[string]bool{}
	for _, p := range d.Pools {
		for _, dev := range p.Devices {
			id := dev.Address.String()
			if _, of := prepared[id]; !seen[id] && d.isOffered(id, dev, of) {
				out = d.addDevice(out, p.Name, dev, of)
			}
			seen[id] = true
		}
	}
	for _, id := range slices.Sorted(maps.Keys(prepared)) {
		if seen[id] || d.Held[id] != "" {
			continue
		}
		// A claimed device that is missing from the configuration or the machine stays in the slice, where its taint makes Kubernetes
		// evict the pods that have it.
		if address, err := pci.ParseAddress(id); err == nil {
			if dev, ok := d.Snapshot.Device(address); ok {
				out = d.addDevice(out, prepared[id], pool.Device{Device: dev}, true)
			} else {
				out = append(out, d.goneDevice(address, prepared[id]))
			}
		}
	}
	return out
}

// claimedResources returns the resource of each claimed device. The key of the map is the PCI address of the device.
func (d desiredState) claimedResources() map[string]string {
	out := map[string]string{}
	for _, r := range d.records {
		for _, dev := range r.Devices {
			if dev.Resource != "" { // empty if the record is unreadable
				out[dev.ID] = dev.Resource
			}
		}
	}
	return out
}

// isOffered reports whether a device of a pool may be published: not while a pod has it through the device plugin API. A whole PF needs
// an API server that stores counters, unless a claim has it already. Without them, the scheduler could allocate the PF and one of its
// VFs at the same time.
func (d desiredState) isOffered(id string, dev pool.Device, prepared bool) bool {
	return d.Held[id] == "" && (dev.Whole == 0 || d.counters || prepared)
}

// addDevice adds an existing device. If the API server drops taints, addDevice omits a free device that needs a taint.
func (d desiredState) addDevice(out []resourceapi.Device, resource string, dev pool.Device, prepared bool) []resourceapi.Device {
	pf := d.pfOf(dev.Device)
	device := resourceapi.Device{Name: DeviceName(dev.Address), Attributes: d.attributesOf(resource, dev)}
	taints := d.taintsOf(dev.Address.String(), d.pfName(pf), prepared)
	if !d.taints && !prepared && repels(taints) {
		return out
	}
	d.setTaints(&device, taints)
	if n := d.excluded[pf.Address]; d.counters && n > 0 {
		device.ConsumesCounters = counterUse(dev.Device, pf.Address, n)
	}
	return append(out, device)
}

// goneDevice returns the last published entry of a missing device, or one with attributes derived from its address.
func (d desiredState) goneDevice(a pci.Address, resource string) resourceapi.Device {
	device := resourceapi.Device{Name: DeviceName(a), Attributes: d.former[DeviceName(a)].Attributes}
	if !isSortable(device) {
		device.Attributes = d.attributesOf(resource, pool.Device{Device: pci.Device{Address: a, NUMANode: pci.Unknown, VFIndex: pci.Unknown}})
		device.Attributes[attrKind] = text(kindVF)
	}
	d.setTaints(&device, taint(taintGone, "", d.Taints.Gone))
	return device
}

// isSortable reports whether a device has the attributes that compareDevices needs. Another program may have removed them from a slice.
func isSortable(d resourceapi.Device) bool {
	a := d.Attributes
	return a[attrNUMA].IntValue != nil && a[attrVF].IntValue != nil && a[attrPFAddress].StringValue != nil
}

// setTaints sets the taints of a device, unless the API server drops taints.
func (d desiredState) setTaints(device *resourceapi.Device, taints []resourceapi.DeviceTaint) {
	if !d.taints {
		return
	}
	keepTimes(taints, d.former[device.Name].Taints, metav1.NewTime(d.now.UTC().Truncate(time.Second)))
	device.Taints = taints
}

// wholePFs maps each PF that is offered as a whole to the number of VFs that pods cannot get while a claim has it.
func (i Inventory) wholePFs() map[pci.Address]int {
	out := map[pci.Address]int{}
	for _, p := range i.Pools {
		for _, dev := range p.Devices {
			if dev.Whole > 0 {
				out[dev.Address] = dev.Whole
			}
		}
	}
	return out
}

// counterUse returns how much of the PF's counter a device uses. A VF uses one unit of the PF's counter, and the PF itself uses all units.
func counterUse(dev pci.Device, pf pci.Address, n int) []resourceapi.DeviceCounterConsumption {
	if dev.IsVF() {
		n = 1
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: counterSet(pf), Counters: count(n)}}
}

func counterSet(pf pci.Address) string { return "pf-" + DeviceName(pf) }

func count(n int) map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{counterVFs: {Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}}
}

// counterSlices returns the slices with the counters of whole PFs, which Kubernetes 1.35 and later require to be apart from devices.
func counterSlices(whole map[pci.Address]int) (out []resourceslice.Slice) {
	for pfs := range slices.Chunk(slices.SortedFunc(maps.Keys(whole), pci.Address.Compare), maxCounterSets) {
		var s resourceslice.Slice
		for _, pf := range pfs {
			s.SharedCounters = append(s.SharedCounters, resourceapi.CounterSet{Name: counterSet(pf), Counters: count(whole[pf])})
		}
		out = append(out, s)
	}
	return out
}

func devicesByName(list []resourceslice.Slice) map[string]resourceapi.Device {
	out := map[string]resourceapi.Device{}
	for _, s := range list {
		for _, dev := range s.Devices {
			out[dev.Name] = dev
		}
	}
	return out
}
