// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

const fast = "example.com/fast"

// defaultTaints returns the default effect of each kind of taint.
func defaultTaints() pool.Taints {
	return pool.Taints{LinkDown: "NoSchedule", Unhealthy: "NoSchedule", Gone: "NoExecute"}
}

// inventoryOf returns an inventory in which all VFs of a machine are in one resource.
func inventoryOf(t testing.TB, m pcitest.Machine) (d desiredState, sysfs string) {
	t.Helper()
	sysfs = pcitest.Generate(t, m)
	s, err := pci.Scan(sysfs)
	if err != nil {
		t.Fatal(err)
	}
	p := pool.Pool{Name: fast, Resource: &pool.Resource{Prefix: "example.com", Name: "fast", API: pool.DRA}}
	i := Inventory{Snapshot: s, Taints: defaultTaints(), Held: map[string]string{}, Faults: map[string]Fault{},
		Last: map[pci.Address]pci.Device{}}
	for _, dev := range s.Devices {
		if dev.IsVF() {
			p.Devices = append(p.Devices, pool.Device{Device: dev})
		}
	}
	for _, n := range s.Nodes {
		i.Nodes = append(i.Nodes, n.ID)
	}
	i.Pools = []pool.Pool{p}
	return desiredState{Inventory: i, node: "node-a", now: time.Unix(1e9, 0), sliceFeatures: sliceFeatures{true, true}}, sysfs
}

// cardsWith returns a machine with the given total number of VFs.
func cardsWith(vfs int) pcitest.Machine {
	switch {
	case vfs == 0:
		return pcitest.Machine{Nodes: 2, PFs: 1}
	case vfs <= 127:
		return pcitest.Machine{Nodes: 1, PFs: 1, VFs: vfs}
	}
	return pcitest.Machine{Nodes: 2, PFs: 8, VFs: vfs / 16}
}

func (d desiredState) publishedSlices() []resourceslice.Slice {
	return d.driverResources().Pools["node-a"].Slices
}

// marshalSlices encodes slices without metadata in the API server's storage format.
func marshalSlices(t testing.TB, all []resourceslice.Slice) (out []byte) {
	t.Helper()
	for _, s := range all {
		object := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: s.Devices, SharedCounters: s.SharedCounters}}
		data, err := object.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, data...)
	}
	return out
}

func findInSlices(t testing.TB, all []resourceslice.Slice, name string) (d resourceapi.Device, ok bool) {
	t.Helper()
	for _, s := range all {
		for _, d := range s.Devices {
			if d.Name == name {
				return d, true
			}
		}
	}
	return d, false
}

func preparedRecord(id string) claim.Record {
	return claim.Record{State: claim.Prepared, Devices: []poddevices.Device{{Resource: fast, ID: id,
		Claim: &poddevices.Claim{UID: "c-" + id}}}}
}

// checkSlices fails the test if an API server of Kubernetes 1.34 to 1.37 would refuse the slices.
func checkSlices(t testing.TB, all []resourceslice.Slice) {
	t.Helper()
	attribute := regexp.MustCompile(`^([a-z0-9.-]{1,63}/)?[a-zA-Z_][a-zA-Z0-9_]{0,31}$`)
	names := map[string]bool{}
	for i, s := range all {
		if len(s.Devices) > 0 && len(s.SharedCounters) > 0 || len(s.SharedCounters) > 8 || len(s.Devices) > 64 {
			t.Errorf("slice %d: %d devices, %d counter sets", i, len(s.Devices), len(s.SharedCounters))
		}
		for _, d := range s.Devices {
			if errs := validation.IsDNS1123Label(d.Name); len(errs) > 0 || names[d.Name] {
				t.Errorf("device %s: %v, or twice", d.Name, errs)
			}
			names[d.Name] = true
			if len(d.Attributes) > 32 {
				t.Errorf("device %s: %d attributes", d.Name, len(d.Attributes))
			}
			for name, a := range d.Attributes {
				if !attribute.MatchString(string(name)) || a.StringValue != nil && len(*a.StringValue) > 64 {
					t.Errorf("device %s: attribute %s: %v", d.Name, name, a)
				}
			}
			for _, taint := range d.Taints {
				if errs := append(validation.IsQualifiedName(taint.Key), validation.IsValidLabelValue(taint.Value)...); len(errs) > 0 {
					t.Errorf("device %s: taint %v: %v", d.Name, taint, errs)
				}
			}
		}
	}
}

// TestSlices checks that all slices form one pool, each with at most 64 devices of one PF, sorted by NUMA node, PF and VF whatever the
// order of the input. A VF needs at most 500 bytes.
func TestSlices(t *testing.T) {
	for vfs, want := range map[int][]int{0: {0}, 1: {1}, 64: {64}, 65: {64, 1}, 127: {64, 63}, 1024: slices.Repeat([]int{64}, 16)} {
		t.Run(fmt.Sprint(vfs), func(t *testing.T) {
			d, _ := inventoryOf(t, cardsWith(vfs))
			all := d.publishedSlices()
			checkSlices(t, all)
			var sizes []int
			last := ""
			for _, s := range all {
				sizes = append(sizes, len(s.Devices))
				for _, dev := range s.Devices {
					a := dev.Attributes
					key := fmt.Sprintf("%d %s %04d", *a[attrNUMA].IntValue, *a[attrPFAddress].StringValue, *a[attrVF].IntValue)
					if key <= last || *a[attrPFAddress].StringValue != *s.Devices[0].Attributes[attrPFAddress].StringValue {
						t.Errorf("%s after %s", key, last)
					}
					last = key
				}
			}
			if diff := cmp.Diff(want, sizes); diff != "" {
				t.Error(diff)
			}
			bytes := marshalSlices(t, all)
			if n := (len(bytes) - 32) / max(vfs, 1); n > 500 { // 32 bytes for the slice itself
				t.Errorf("%d bytes for each VF: want at most 500", n)
			}
			shuffles := 5
			if vfs == 65 {
				shuffles = 1000
			}
			for range shuffles {
				shuffled := d
				shuffled.Pools = []pool.Pool{{Name: fast, Resource: d.Pools[0].Resource, Devices: slices.Clone(d.Pools[0].Devices)}}
				devices := shuffled.Pools[0].Devices
				rand.Shuffle(len(devices), func(i, j int) { devices[i], devices[j] = devices[j], devices[i] })
				if string(marshalSlices(t, shuffled.publishedSlices())) != string(bytes) {
					t.Fatal("another order gives other bytes")
				}
			}
		})
	}
}

// TestOrder: the NUMA node of a device matters more than its PF, and unknown NUMA nodes come last. A PF comes after its VFs.
func TestOrder(t *testing.T) {
	var devices []resourceapi.Device
	for _, d := range []struct {
		pf       string
		numa, vf int
	}{{"0000:99:00.0", 0, 1}, {"0000:99:00.0", 0, -1}, {"0000:11:00.0", 1, 0}, {"0000:55:00.0", 1, 0}, {"0000:00:00.0", -1, 0}} {
		devices = append(devices, resourceapi.Device{Name: fmt.Sprint(d), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			attrPFAddress: text(d.pf), attrNUMA: number(d.numa), attrVF: number(d.vf)}})
	}
	shuffled := slices.Clone(devices)
	rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	slices.SortFunc(shuffled, compareDevices)
	if diff := cmp.Diff(devices, shuffled); diff != "" {
		t.Error(diff)
	}
}

// TestAttributes: each device has all attributes, the standard ones with the values that the Kubernetes library reads from sysfs. If
// the NUMA node is unknown, it has numa but not numaNode.
func TestAttributes(t *testing.T) {
	for _, nodes := range []int{0, 2} {
		d, sysfs := inventoryOf(t, pcitest.Machine{Nodes: nodes, PFs: 2, VFs: 2})
		d.Pools[0].Devices[0].Interfaces = nil // the interface is in a pod
		for _, dev := range d.Pools[0].Devices {
			id := dev.Address.String()
			got, _ := findInSlices(t, d.publishedSlices(), DeviceName(dev.Address))
			from := deviceattribute.WithFSFromRoot(sysfs)
			root, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(id, from)
			if err != nil {
				t.Fatal(err)
			}
			bus, err := deviceattribute.GetPCIBusIDAttribute(id)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range []deviceattribute.DeviceAttribute{root, bus} {
				if diff := cmp.Diff(want.Value, got.Attributes[want.Name]); diff != "" {
					t.Errorf("%s of %s: %s", want.Name, id, diff)
				}
			}
			numa, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(id, deviceattribute.ScalarAttribute, from)
			for _, name := range []resourceapi.QualifiedName{deviceattribute.StandardDeviceAttributeNUMANode, attrOldNUMA} {
				have, ok := got.Attributes[name]
				if ok != (err == nil) || ok && !cmp.Equal(have, numa.Value) {
					t.Errorf("%s of %s: %v, %v", name, id, have, err)
				}
			}
			want := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{attrMultusDevice: text(id), attrMultusResource: text(fast),
				attrResource: text(fast), attrKind: text("vf"), attrPF: text(mustPF(t, d, dev).Interfaces[0]), attrPFAddress: text(dev.PF.String()),
				attrCard: text(strings.TrimSuffix(dev.PF.String(), ".0")), attrVF: number(dev.VFIndex), attrNUMA: number(dev.NUMANode),
				attrVendor: text("8086"), attrProduct: text("1889"), attrDriver: text("iavf"), attrLinkType: text("ether"),
				attrRDMA: {BoolValue: new(false)}}
			for name, value := range want {
				if diff := cmp.Diff(value, got.Attributes[name]); diff != "" {
					t.Errorf("%s of %s: %s", name, id, diff)
				}
			}
			if n := len(want) + 2; len(got.Attributes) != n+map[bool]int{true: 2}[err == nil] {
				t.Errorf("%s has %d attributes, want %d and those of NUMA", id, len(got.Attributes), n)
			}
		}
	}
}

func mustPF(t *testing.T, d desiredState, dev pool.Device) pci.Device {
	t.Helper()
	pf, ok := d.Snapshot.Device(dev.PF)
	if !ok {
		t.Fatal(dev.PF)
	}
	return pf
}

// TestStable: attributes do not change when the interface moves to a pod or when another driver is bound.
func TestStable(t *testing.T) {
	d, _ := inventoryOf(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 1})
	vf := &d.Pools[0].Devices[0]
	vf.Device.RDMA = []string{"mlx5_2"}
	d.Pools[0].Resource.Driver = "iavf"
	before := marshalSlices(t, d.publishedSlices())
	pf := mustPF(t, d, *vf)
	d.Last[vf.Address], d.Last[pf.Address] = vf.Device, pf
	vf.Interfaces, vf.Device.RDMA, vf.Carrier = nil, nil, false
	d.Snapshot = &pci.Snapshot{Devices: slices.Clone(d.Snapshot.Devices), Nodes: d.Snapshot.Nodes}
	for i := range d.Snapshot.Devices {
		d.Snapshot.Devices[i].Interfaces, d.Snapshot.Devices[i].Carrier = nil, false
	}
	if string(marshalSlices(t, d.publishedSlices())) != string(before) {
		t.Error("a VF in a pod changes the slice")
	}
	vf.Driver = "vfio-pci" // a claim chose this driver; the driver of the resource is bound again later
	if string(marshalSlices(t, d.publishedSlices())) != string(before) && *d.attributesOf(fast, *vf)[attrDriver].StringValue != "iavf" {
		t.Error("the driver of a moment changes the slice")
	}
}

// TestPublishedDevices: devices that pods have through the device plugin API are not published. Claimed ones are, even if missing from
// the configuration or the machine.
func TestPublishedDevices(t *testing.T) {
	d, _ := inventoryOf(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 6})
	devices := d.Pools[0].Devices
	id := func(i int) string { return devices[i].Address.String() }
	d.Held[id(1)] = "pod shop/web-0"
	d.records = []claim.Record{preparedRecord(id(2)), preparedRecord(id(3)), preparedRecord(id(4)), preparedRecord("0000:99:01.0")}
	full := d.publishedSlices()
	d.former = map[string]resourceapi.Device{}
	for _, dev := range full[0].Devices {
		d.former[dev.Name] = dev
	}
	moved := slices.Clone(devices[:3]) // the configuration no longer has 3, 4 and 5
	d.Pools[0].Devices = moved
	left := slices.DeleteFunc(slices.Clone(d.Snapshot.Devices), func(dev pci.Device) bool {
		return dev.Address.String() == id(4) // the machine no longer has 4
	})
	d.Snapshot = &pci.Snapshot{Nodes: d.Snapshot.Nodes, Devices: left}
	all := d.publishedSlices()
	checkSlices(t, all)
	for i, want := range []string{"", "absent", "", "", taintGone, "absent"} {
		dev, ok := findInSlices(t, all, DeviceName(devices[i].Address))
		got := ""
		if !ok {
			got = "absent"
		} else if len(dev.Taints) > 0 {
			got = dev.Taints[0].Key
		}
		if got != want {
			t.Errorf("VF %d: %q, want %q", i, got, want)
		}
		if ok && len(dev.Attributes) != len(d.attributesOf(fast, devices[i])) {
			t.Errorf("VF %d has %d attributes", i, len(dev.Attributes))
		}
	}
	if n := len(all[0].Devices); n != 4 {
		t.Errorf("the slice of the PF has %d devices", n)
	}
	never, ok := findInSlices(t, all, "0000-99-01-0") // missing before this daemon has started
	if !ok || never.Taints[0].Effect != resourceapi.DeviceTaintEffectNoExecute || *never.Attributes[attrNUMA].IntValue != -1 {
		t.Errorf("%+v", never)
	}
}

// TestWhole checks that counters, at most 8 sets for each slice, prevent the allocation of a VF while its PF is allocated as a whole.
// Without them, whole PFs are not published.
func TestWhole(t *testing.T) {
	d, _ := inventoryOf(t, pcitest.Machine{Nodes: 1, PFs: 9, VFs: 3})
	plain := marshalSlices(t, d.publishedSlices())
	var pfs []pool.Device
	for _, dev := range d.Snapshot.Devices {
		if !dev.IsVF() {
			pfs = append(pfs, pool.Device{Device: dev, Whole: 3})
		}
	}
	d.Pools = append(d.Pools, pool.Pool{Name: "example.com/whole", Resource: &pool.Resource{API: pool.DRA}, Devices: pfs})
	d.Held[pfs[8].Address.String()] = "pod shop/web-0" // its VFs still consume counters
	all := d.publishedSlices()
	checkSlices(t, all)
	var sets, devices []int
	for _, s := range all {
		sets, devices = append(sets, len(s.SharedCounters)), append(devices, len(s.Devices))
		for _, c := range s.SharedCounters {
			if n := c.Counters[counterVFs]; n.Value.Value() != 3 {
				t.Errorf("%+v", c)
			}
		}
		for i, dev := range s.Devices {
			want, kind := int64(1), "vf"
			if i == 3 { // the PF comes after its VFs
				want, kind = 3, "pf"
			}
			consumed := dev.ConsumesCounters[0]
			if n := consumed.Counters[counterVFs]; n.Value.Value() != want || *dev.Attributes[attrKind].StringValue != kind ||
				consumed.CounterSet != "pf-"+DeviceName(pfOf(t, *dev.Attributes[attrPFAddress].StringValue)) {
				t.Errorf("%s: %+v", dev.Name, dev)
			}
		}
	}
	if diff := cmp.Diff([][]int{{8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 3}}, [][]int{sets, devices}); diff != "" {
		t.Error(diff)
	}
	d.counters = false
	if string(marshalSlices(t, d.publishedSlices())) != string(plain) {
		t.Error("without the feature")
	}
}

func pfOf(t *testing.T, address string) pci.Address {
	t.Helper()
	a, err := pci.ParseAddress(filepath.Base(address))
	if err != nil {
		t.Fatal(err)
	}
	return a
}
