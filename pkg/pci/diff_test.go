// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/pci/pcitest"
)

func changes(list []Change) (out []string) {
	for _, c := range list {
		out = append(out, c.String())
	}
	return out
}

// TestDiffTree: what happens to a machine is told device by device, and looking changes nothing.
func TestDiffTree(t *testing.T) {
	sysfs := pcitest.Extract(t, "two-sockets")
	before := mustScan(t, sysfs)
	if diff := Diff(before, mustScan(t, sysfs)); len(diff) > 0 {
		t.Errorf("nothing happened: %v", changes(diff))
	}
	pcitest.Set(t, sysfs, "0000:3b:00.0", "net/ens1f0/carrier", "0")
	pcitest.Set(t, sysfs, "0000:3b:10.0", "driver", "-> ../../../../bus/pci/drivers/vfio-pci")
	pcitest.Set(t, sysfs, "0000:3b:10.0", "uio/uio0/name", "x")
	pcitest.Remove(t, sysfs, "0000:86:00.1")
	after := mustScan(t, sysfs)
	want := []string{
		"0000:3b:00.0 changed: carrier true, now false",
		"0000:3b:10.0 changed: driver igbvf, now vfio-pci; uio none, now [uio0]",
		"0000:86:00.1 removed", "0000:86:10.1 removed", "0000:86:10.3 removed",
	}
	if diff := cmp.Diff(want, changes(Diff(before, after))); diff != "" {
		t.Error(diff)
	}
	back := changes(Diff(after, before))
	if len(back) != 5 || back[2] != "0000:86:00.1 added" || back[1] != "0000:3b:10.0 changed: driver vfio-pci, now igbvf; uio [uio0], now none" {
		t.Errorf("the other way: %q", back)
	}
}

func TestDiffNil(t *testing.T) {
	one := &Snapshot{Devices: []Device{{Address: address(t, "0000:3b:10.0")}}, Nodes: []Node{{ID: 0}}}
	for _, c := range []struct {
		from, to *Snapshot
		want     []string
	}{
		{nil, one, []string{"0000:3b:10.0 added", "NUMA nodes changed"}},
		{one, nil, []string{"0000:3b:10.0 removed", "NUMA nodes changed"}},
		{nil, nil, nil},
		{one, one, nil},
		{&Snapshot{Devices: []Device{}, Nodes: []Node{}}, nil, nil},
	} {
		if diff := cmp.Diff(c.want, changes(Diff(c.from, c.to))); diff != "" {
			t.Error(diff)
		}
	}
}

// TestDiffFields: a change of any field of a device is seen, and told by its name in JSON.
func TestDiffFields(t *testing.T) {
	of := reflect.TypeFor[Device]()
	for i := 1; i < of.NumField(); i++ { // 0 is the address
		d := Device{Address: address(t, "0000:3b:10.0")}
		was := &Snapshot{Devices: []Device{d}}
		switch v := reflect.ValueOf(&d).Elem().Field(i); v.Kind() {
		case reflect.String:
			v.SetString("x")
		case reflect.Bool:
			v.SetBool(true)
		case reflect.Int:
			v.SetInt(7)
		case reflect.Uint32, reflect.Uint64:
			v.SetUint(7)
		case reflect.Slice:
			v.Set(reflect.ValueOf([]string{"x"}))
		default:
			v.Set(reflect.ValueOf(address(t, "0000:3b:00.0")))
		}
		name, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
		got := Diff(was, &Snapshot{Devices: []Device{d}})
		if len(got) != 1 || got[0].Kind != Changed || !slices.Equal(got[0].Fields, []string{name}) || !got[0].Has(name) || got[0].Has("other") ||
			!strings.HasPrefix(got[0].String(), "0000:3b:10.0 changed: "+name+" ") {
			t.Errorf("%s: %+v", of.Field(i).Name, got)
		}
		if len(got) == 1 && (got[0].Old.Address != d.Address || !reflect.DeepEqual(got[0].New, d)) {
			t.Errorf("%s: %+v", of.Field(i).Name, got[0])
		}
	}
}

// TestDiffEmptyLists: no list and an empty one are the same.
func TestDiffEmptyLists(t *testing.T) {
	a := &Snapshot{Devices: []Device{{Address: address(t, "0000:3b:10.0")}}}
	b := &Snapshot{Devices: []Device{{Address: address(t, "0000:3b:10.0"), Interfaces: []string{}, RDMA: []string{}}}}
	if got := Diff(a, b); len(got) > 0 {
		t.Error(changes(got))
	}
}

// TestDiffAdds: applying the changes to the one snapshot gives the other, whatever the two are.
func TestDiffAdds(t *testing.T) {
	var devices []Device
	for i := range 4 {
		devices = append(devices, Device{Address: address(t, fmt.Sprintf("0000:3b:10.%d", i))})
	}
	subset := func(bits int) *Snapshot {
		s := &Snapshot{}
		for i, d := range devices {
			if n := bits >> (2 * i) & 3; n > 0 { // absent, or in one of three states
				d.NUMANode = n
				s.Devices = append(s.Devices, d)
			}
		}
		return s
	}
	for from := range 256 {
		for to := 0; to < 256; to += 7 {
			was, is := subset(from), subset(to)
			got := map[Address]Device{}
			for _, d := range was.Devices {
				got[d.Address] = d
			}
			list := Diff(was, is)
			for _, c := range list {
				_, had := got[c.Address]
				if had == (c.Kind == Added) {
					t.Fatalf("%s of %v", c, was)
				}
				if got[c.Address] = c.New; c.Kind == Removed {
					delete(got, c.Address)
				}
			}
			if !slices.IsSortedFunc(list, func(a, b Change) int { return a.Address.Compare(b.Address) }) || len(got) != len(is.Devices) {
				t.Fatalf("%v to %v: %v", was, is, list)
			}
			for _, d := range is.Devices {
				if got[d.Address].NUMANode != d.NUMANode {
					t.Fatalf("%v to %v: %v", was, is, list)
				}
			}
		}
	}
}
