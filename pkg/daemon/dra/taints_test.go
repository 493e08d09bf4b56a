// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// TestTaints: each kind of fault has its taint key, value and configured effect. If the API server drops taints, free devices with
// faults are not published.
func TestTaints(t *testing.T) {
	for _, c := range []struct {
		fault    Fault
		prepared bool
		taints   pool.Taints
		want     string // key=value:effect
		left     bool   // published without the feature
	}{
		{fault: Fault{LinkDown, "x"}, taints: defaultTaints(), want: "sriov.podlace.io/link-down=ens0f0:NoSchedule"},
		{fault: Fault{"no-driver", "x"}, taints: defaultTaints(), want: "sriov.podlace.io/unhealthy=no-driver:NoSchedule"},
		{fault: Fault{Held, "x"}, taints: defaultTaints(), want: "sriov.podlace.io/held=:NoSchedule"},
		{fault: Fault{Held, "x"}, taints: defaultTaints(), prepared: true, left: true},
		{fault: Fault{LinkDown, "x"}, taints: defaultTaints(), prepared: true, want: "sriov.podlace.io/link-down=ens0f0:NoSchedule", left: true},
		{fault: Fault{LinkDown, "x"}, taints: pool.Taints{LinkDown: "NoExecute"}, want: "sriov.podlace.io/link-down=ens0f0:NoExecute"},
		{fault: Fault{LinkDown, "x"}, taints: pool.Taints{LinkDown: "None"}, want: "sriov.podlace.io/link-down=ens0f0:None", left: true},
		{fault: Fault{LinkDown, "x"}, taints: pool.Taints{LinkDown: "off"}, left: true},
		{taints: defaultTaints(), left: true},
	} {
		d, _ := inventoryOf(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
		dev := d.Pools[0].Devices[0]
		id, name := dev.Address.String(), DeviceName(dev.Address)
		if d.Taints = c.taints; c.fault.Kind != "" {
			d.Faults[id] = c.fault
		}
		if c.prepared {
			d.records = []claim.Record{preparedRecord(id)}
		}
		got, _ := findInSlices(t, d.publishedSlices(), name)
		text := ""
		for _, taint := range got.Taints {
			text += fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect)
		}
		if text != c.want {
			t.Errorf("%+v: %q", c, text)
		}
		d.taints = false
		if got, ok := findInSlices(t, d.publishedSlices(), name); ok != c.left || len(got.Taints) > 0 {
			t.Errorf("%+v: without the feature: %t, %v", c, ok, got.Taints)
		}
	}
	for in, want := range map[string]string{"ens1f0": "ens1f0", "a@b": "a-b", "-x-": "x", "": "",
		strings.Repeat("y", 70): strings.Repeat("y", 63)} {
		if got := labelValue(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}

// TestTimeAdded: a taint keeps its time while key, value and effect stay, also across a restart and when its device moves to another
// slice.
func TestTimeAdded(t *testing.T) {
	d, _ := inventoryOf(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
	dev := d.Pools[0].Devices[0]
	id, name := dev.Address.String(), DeviceName(dev.Address)
	d.Faults[id] = Fault{LinkDown, "x"}
	first, _ := findInSlices(t, d.publishedSlices(), name)
	if first.Taints[0].TimeAdded == nil || !first.Taints[0].TimeAdded.Time.Equal(d.now) {
		t.Fatalf("%+v", first.Taints)
	}
	stored := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{*first.DeepCopy()}}}
	since := metav1.NewTime(d.now.Add(-time.Hour))
	stored.Spec.Devices[0].Taints[0].TimeAdded = &since
	d.former = devicesByName([]resourceslice.Slice{{}, {Devices: stored.Spec.Devices}})
	for _, c := range []struct {
		what   string
		change func(*desiredState)
		want   time.Time
	}{
		{"nothing", func(*desiredState) {}, since.Time},
		{"another effect", func(d *desiredState) { d.Taints.LinkDown = "NoExecute" }, d.now},
		{"another key", func(d *desiredState) { d.Faults = map[string]Fault{id: {"no-driver", "x"}} }, d.now},
		{"another PF name", func(d *desiredState) {
			d.Snapshot = &pci.Snapshot{Devices: slices.Clone(d.Snapshot.Devices), Nodes: d.Snapshot.Nodes}
			d.Snapshot.Devices[0].Interfaces = []string{"eth9"}
		}, d.now},
		{"no time", func(d *desiredState) {
			former := *stored.Spec.Devices[0].DeepCopy()
			former.Taints[0].TimeAdded = nil
			d.former = map[string]resourceapi.Device{name: former}
		}, d.now},
	} {
		changed := d
		c.change(&changed)
		got, _ := findInSlices(t, changed.publishedSlices(), name)
		if len(got.Taints) != 1 || !got.Taints[0].TimeAdded.Time.Equal(c.want) {
			t.Errorf("%s: %+v, want %s", c.what, got.Taints, c.want)
		}
	}
}
