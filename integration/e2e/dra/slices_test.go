// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/integration/pcitest"
)

// slices returns the driver's slices by the address of their PF and the index of their first device.
func (l *lab) slices() []resourceapi.ResourceSlice {
	l.Helper()
	list, err := l.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{
		FieldSelector: "spec.driver=" + driverName})
	if err != nil {
		l.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(firstDevice(a), firstDevice(b)) })
	return list.Items
}

func firstDevice(s resourceapi.ResourceSlice) string {
	if len(s.Spec.Devices) == 0 {
		return ""
	}
	return s.Spec.Devices[0].Name
}

// devices returns all published devices by name.
func (l *lab) devices() map[string]resourceapi.Device {
	l.Helper()
	all := map[string]resourceapi.Device{}
	for _, s := range l.slices() {
		for _, d := range s.Spec.Devices {
			all[d.Name] = d
		}
	}
	return all
}

// published waits until the slices contain all VFs of the node.
func (l *lab) published() {
	l.Helper()
	within(l.T, "the VFs are in slices", func() error { return errors.Join(l.offers(l.ids...), l.tainted("", false)) })
}

// offers returns an error unless the pool's slices are complete and have exactly these VFs.
func (l *lab) offers(ids ...string) error {
	var want, got []string
	for _, id := range ids {
		want = append(want, deviceName(id))
	}
	all := l.slices()
	for _, s := range all {
		if s.Spec.Pool.ResourceSliceCount != int64(len(all)) || s.Spec.Pool.Generation != all[0].Spec.Pool.Generation {
			return fmt.Errorf("slice %s: %+v beside %d slices", s.Name, s.Spec.Pool, len(all))
		}
		for _, d := range s.Spec.Devices {
			got = append(got, d.Name)
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		return fmt.Errorf("%v: want %v", got, want)
	}
	return nil
}

// content returns the specs of ResourceSlices, because the daemon writes only the spec.
func content(list []resourceapi.ResourceSlice) (all []resourceapi.ResourceSliceSpec) {
	for _, s := range list {
		all = append(all, s.Spec)
	}
	return all
}

// contentOf returns the content of slices without the pool generations.
func contentOf(list []resourceapi.ResourceSlice) []resourceapi.ResourceSliceSpec {
	all := content(list)
	for i := range all {
		all[i].Pool.Generation = 0
	}
	return all
}

func text(d resourceapi.Device, name resourceapi.QualifiedName) string {
	if v := d.Attributes[name].StringValue; v != nil {
		return *v
	}
	return ""
}

func number(d resourceapi.Device, name resourceapi.QualifiedName) int64 {
	if v := d.Attributes[name].IntValue; v != nil {
		return *v
	}
	return -100
}

// TestPublished: each VF is a device in the slice of its PF, in the node's pool, with the attributes that selectors can use and none that
// changes often. A restarted daemon writes no slice.
func TestPublished(t *testing.T) {
	l := newLab(t, setup{})
	all := l.slices()
	if len(all) != 2 {
		t.Fatalf("%d slices: want one for each PF", len(all))
	}
	node, err := l.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range all {
		if s.Spec.Pool.Name != nodeName || s.Spec.NodeName == nil || *s.Spec.NodeName != nodeName || len(s.Spec.Devices) != 4 {
			t.Errorf("slice %s: %+v", s.Name, s.Spec)
		}
		if len(s.OwnerReferences) != 1 || s.OwnerReferences[0].UID != node.UID {
			t.Errorf("slice %s is owned by %+v: want the node", s.Name, s.OwnerReferences)
		}
		for n, d := range s.Spec.Devices {
			id := l.ids[4*i+n]
			if d.Name != deviceName(id) || len(d.Taints) > 0 {
				t.Errorf("device %d of slice %d is %+v: want %s", n, i, d, id)
			}
			got := []string{text(d, "resource.kubernetes.io/pciBusID"), text(d, "resource"), text(d, "kind"), text(d, "pf"), text(d, "pfAddress"),
				text(d, "vendor"), text(d, "driver"), fmt.Sprint(number(d, "vf"), number(d, "numa"), number(d, "resource.kubernetes.io/numaNode"))}
			want := []string{id, resource, "vf", []string{pf0Name, pf1Name}[i], l.pfOf(id), "8086", "iavf", fmt.Sprint(n, i, i)}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %s", id, diff)
			}
		}
		t.Logf("slice %s of %d devices: %d bytes of protobuf each", s.Name, len(s.Spec.Devices), s.Spec.Devices[0].Size())
		if size := s.Spec.Devices[0].Size(); size > 500 {
			t.Errorf("%d bytes for a device", size)
		}
	}
	mark := l.mark()
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		l.restart(signal)
	}
	remains(t, "the slices stay as they are", func() error {
		if diff := cmp.Diff(all, l.slices()); diff != "" {
			return fmt.Errorf("%s", diff)
		}
		return nil
	})
	if w := l.writes(mark, ""); len(w) > 0 {
		t.Errorf("the daemon has written %+v", w)
	}
}

// TestSliceDeleted: the daemon restores one or all deleted slices with the same devices.
func TestSliceDeleted(t *testing.T) {
	l := newLab(t, setup{})
	before := contentOf(l.slices())
	for _, n := range []int{1, 2} {
		mark := l.mark()
		for _, s := range l.slices()[:n] {
			if err := l.client.ResourceV1().ResourceSlices().Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		took := within(t, "the slices are back", func() error {
			if diff := cmp.Diff(before, contentOf(l.slices())); diff != "" {
				return fmt.Errorf("%s", diff)
			}
			return nil
		})
		t.Logf("%d slices of %d are back after %.1f s, with %d writes", n, len(before), took.Seconds(), len(l.writes(mark, "resourceslices")))
	}
}

// TestSliceEdited: the daemon restores an edited slice.
func TestSliceEdited(t *testing.T) {
	l := newLab(t, setup{})
	before := contentOf(l.slices())
	for what, edit := range map[string]func(*resourceapi.ResourceSlice){
		"an attribute": func(s *resourceapi.ResourceSlice) {
			wrong := int64(7)
			s.Spec.Devices[1].Attributes["numa"] = resourceapi.DeviceAttribute{IntValue: &wrong}
		},
		"a device less":  func(s *resourceapi.ResourceSlice) { s.Spec.Devices = s.Spec.Devices[1:] },
		"the generation": func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Generation += 3 },
	} {
		slice := l.slices()[0]
		edit(&slice)
		if _, err := l.client.ResourceV1().ResourceSlices().Update(t.Context(), &slice, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		took := within(t, "the slices are as before: "+what, func() error {
			if diff := cmp.Diff(before, contentOf(l.slices())); diff != "" {
				return fmt.Errorf("%s", diff)
			}
			return l.offers(l.ids...)
		})
		t.Logf("%s: as before after %.1f s", what, took.Seconds())
	}
}

// TestGeneration: when a PF loses its link, the daemon writes one slice of the same generation. When a VF disappears, only its slice
// changes.
func TestGeneration(t *testing.T) {
	needGate(t, "DRADeviceTaints")
	l := newLab(t, setup{})
	before, mark := l.slices(), l.mark()
	for _, on := range []bool{false, true} {
		l.carrier(pf0, pf0Name, on)
		took := within(t, fmt.Sprintf("the carrier is %t in the slices", on), func() error { return l.tainted(pf0, !on) })
		t.Logf("carrier %t: in the slices after %.1f s", on, took.Seconds())
	}
	if w := l.writes(mark, ""); len(w) != 2 {
		t.Errorf("%d writes: want one for each change of the link: %+v", len(w), w)
	}
	after := l.slices()
	if after[0].Spec.Pool.Generation != before[0].Spec.Pool.Generation || after[1].ResourceVersion != before[1].ResourceVersion {
		t.Errorf("the pool of %+v is %+v", content(before), content(after))
	}
	mark = l.mark()
	pcitest.Remove(t, l.sysfs, l.ids[7])
	delete(l.before, l.ids[7])
	within(t, "the VF is gone from its slice", func() error { return l.offers(l.ids[:7]...) })
	if w := l.writes(mark, ""); len(w) != 1 {
		t.Errorf("%d writes: want one: %+v", len(w), w)
	}
}

// tainted returns an error unless all VFs of the PF, and no others, have the taint link-down. Without want, none may have it.
func (l *lab) tainted(pf string, want bool) error {
	for name, d := range l.devices() {
		has := slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
			return t.Key == driverName+"/link-down" && t.Effect == resourceapi.DeviceTaintEffectNoSchedule
		})
		if has != (want && text(d, "pfAddress") == pf) {
			return fmt.Errorf("device %s has the taints %+v", name, d.Taints)
		}
	}
	return nil
}
