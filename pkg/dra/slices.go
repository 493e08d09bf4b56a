// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
)

const (
	// maxDevices is the largest number of devices in a slice with taints or counters. All slices keep this limit, because a longer slice
	// could not get a taint later.
	maxDevices = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	// maxCounterSets is the largest number of counter sets in a slice. Each PF offered as a whole has one.
	maxCounterSets = resourceapi.ResourceSliceMaxCounterSets

	counterVFs = "vfs"
)

// features are the optional fields that the API server stores. It drops fields of disabled features.
type features struct{ taints, counters bool }

// desired is the input for computing the slices.
type desired struct {
	Inventory
	node    string
	records []claim.Record
	former  map[string]resourceapi.Device // by name: devices as last published
	now     time.Time
	features

	excluded map[pci.Address]int // number of VFs that each PF offered as a whole excludes
}

// entry is a device with its sort keys.
type entry struct {
	device resourceapi.Device
	numa   int // pci.Unknown (-1) if unknown
	pf     pci.Address
	vf     int
}

// resources returns what the node publishes: one pool with at least one slice, and separate slices for each PF. The result does not
// depend on the order of the input.
func (d desired) resources() *resourceslice.DriverResources {
	entries := d.entries()
	var out []resourceslice.Slice
	if d.counters {
		out = counterSlices(d.whole())
	}
	slices.SortFunc(entries, entry.compare)
	for len(entries) > 0 {
		of := entries[0].pf
		n := 0
		for n < len(entries) && n < maxDevices && entries[n].pf == of {
			n++
		}
		var s resourceslice.Slice
		for _, e := range entries[:n] {
			s.Devices = append(s.Devices, e.device)
		}
		out, entries = append(out, s), entries[n:]
	}
	if len(out) == 0 {
		out = append(out, resourceslice.Slice{})
	}
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.node: {Slices: out}}}
}

// compare orders by NUMA node with unknown nodes last, then by PF and VF index, with the PF after its VFs. The order matters because the
// scheduler takes the first device that fits.
func (e entry) compare(o entry) int {
	last := func(n int) uint { return uint(n) } // -1 becomes the largest number
	return cmp.Or(cmp.Compare(last(e.numa), last(o.numa)), e.pf.Compare(o.pf), cmp.Compare(last(e.vf), last(o.vf)),
		strings.Compare(e.device.Name, o.device.Name))
}

// entries returns all devices to publish, unsorted.
func (d desired) entries() (out []entry) {
	prepared := d.prepared()
	d.excluded = d.whole()
	seen := map[string]bool{}
	for _, p := range d.Pools {
		for _, dev := range p.Devices {
			id := dev.Address.String()
			if _, of := prepared[id]; !seen[id] && d.offered(id, dev, of) {
				out = d.add(out, p.Name, dev, of)
			}
			seen[id] = true
		}
	}
	for _, id := range slices.Sorted(maps.Keys(prepared)) {
		if seen[id] || d.Held[id] != "" {
			continue
		}
		// The configuration or the machine no longer has the device. It must stay in the slice for the eviction of its pods.
		if address, err := pci.ParseAddress(id); err == nil {
			if dev, ok := d.Snapshot.Device(address); ok {
				out = d.add(out, prepared[id], pool.Device{Device: dev}, true)
			} else {
				out = append(out, d.gone(address, prepared[id]))
			}
		}
	}
	return out
}

// prepared returns the resource of each claimed device, by address.
func (d desired) prepared() map[string]string {
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

// offered reports whether a device of a pool may be published: nothing but a claim has it. A whole PF also needs counters, to exclude its
// VFs.
func (d desired) offered(id string, dev pool.Device, prepared bool) bool {
	return d.Held[id] == "" && (dev.Whole == 0 || d.counters || prepared)
}

// add adds an existing device. If the API server drops taints, it omits a free device that needs one.
func (d desired) add(out []entry, resource string, dev pool.Device, prepared bool) []entry {
	id, pf := dev.Address.String(), d.pfOf(dev.Device)
	e := entry{numa: dev.NUMANode, pf: pf.Address, vf: dev.VFIndex}
	e.device = resourceapi.Device{Name: DeviceName(dev.Address), Attributes: d.attributes(resource, dev)}
	taints := d.taintsOf(id, d.pfName(pf), prepared)
	if !d.taints && !prepared && repels(taints) {
		return out
	}
	d.setTaints(&e.device, taints)
	if n := d.excluded[e.pf]; d.counters && n > 0 {
		e.device.ConsumesCounters = consumption(dev.Device, e.pf, n)
	}
	return append(out, e)
}

// gone returns a missing device as last published. Without that, it derives what it can from the address.
func (d desired) gone(a pci.Address, resource string) entry {
	name := DeviceName(a)
	e := entry{numa: pci.Unknown, vf: pci.Unknown}
	former, ok := d.former[name]
	if !ok {
		former.Attributes = d.attributes(resource, pool.Device{Device: pci.Device{Address: a, NUMANode: pci.Unknown, VFIndex: pci.Unknown}})
		former.Attributes[attrKind] = text(kindVF)
	}
	e.device = resourceapi.Device{Name: name, Attributes: former.Attributes}
	if n := former.Attributes[attrNUMA].IntValue; n != nil {
		e.numa = int(*n)
	}
	if n := former.Attributes[attrVF].IntValue; n != nil {
		e.vf = int(*n)
	}
	if s := former.Attributes[attrPFAddress].StringValue; s != nil {
		e.pf, _ = pci.ParseAddress(*s) // the zero value sorts as a separate PF
	}
	d.setTaints(&e.device, d.goneTaints())
	return e
}

// setTaints sets the taints of a device if the API server stores them.
func (d desired) setTaints(device *resourceapi.Device, taints []resourceapi.DeviceTaint) {
	if !d.taints {
		return
	}
	keepTimes(taints, d.former[device.Name].Taints, metav1.NewTime(d.now.UTC().Truncate(time.Second)))
	device.Taints = taints
}

// whole returns the number of VFs that each PF offered as a whole excludes.
func (i Inventory) whole() map[pci.Address]int {
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

// consumption returns how much a device consumes of its PF's counter of n VFs: one for a VF, n for the PF.
func consumption(dev pci.Device, pf pci.Address, n int) []resourceapi.DeviceCounterConsumption {
	if dev.IsVF() {
		n = 1
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: counterSet(pf), Counters: count(n)}}
}

func counterSet(pf pci.Address) string { return "pf-" + DeviceName(pf) }

func count(n int) map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{counterVFs: {Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}}
}

// counterSlices returns the counters of PFs offered as a whole. Since Kubernetes 1.35 counters must not be in a slice with devices.
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

// formerDevices returns the devices of slices, by name.
func formerDevices(stored []resourceapi.ResourceSlice) map[string]resourceapi.Device {
	out := map[string]resourceapi.Device{}
	for _, s := range stored {
		for _, dev := range s.Spec.Devices {
			out[dev.Name] = dev
		}
	}
	return out
}

// describe returns the numbers of slices and devices for the log.
func describe(r *resourceslice.DriverResources) string {
	n, devices := 0, 0
	for _, p := range r.Pools {
		for _, s := range p.Slices {
			n, devices = n+1, devices+len(s.Devices)
		}
	}
	return fmt.Sprintf("%d slices with %d devices", n, devices)
}
