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

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pci/pcitest"
	"github.com/podlace/podlace/pkg/pool"
)

// TestTaints: each fault has its key, value and configured effect. If the API server drops taints, free faulty devices are not published.
func TestTaints(t *testing.T) {
	for _, c := range []struct {
		fault    Fault
		prepared bool
		taints   pool.Taints
		want     string // key=value:effect
		left     bool   // published without the feature
	}{
		{fault: Fault{LinkDown, "x"}, taints: usual(), want: "sriov.podlace.io/link-down=ens0f0:NoSchedule"},
		{fault: Fault{"no-driver", "x"}, taints: usual(), want: "sriov.podlace.io/unhealthy=no-driver:NoSchedule"},
		{fault: Fault{Held, "x"}, taints: usual(), want: "sriov.podlace.io/held=:NoSchedule"},
		{fault: Fault{Held, "x"}, taints: usual(), prepared: true, left: true},
		{fault: Fault{LinkDown, "x"}, taints: usual(), prepared: true, want: "sriov.podlace.io/link-down=ens0f0:NoSchedule", left: true},
		{fault: Fault{LinkDown, "x"}, taints: pool.Taints{LinkDown: "NoExecute"}, want: "sriov.podlace.io/link-down=ens0f0:NoExecute"},
		{fault: Fault{LinkDown, "x"}, taints: pool.Taints{LinkDown: "None"}, want: "sriov.podlace.io/link-down=ens0f0:None", left: true},
		{fault: Fault{LinkDown, "x"}, taints: pool.Taints{LinkDown: "off"}, left: true},
		{taints: usual(), left: true},
	} {
		d, _ := machine(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
		dev := d.Pools[0].Devices[0]
		id, name := dev.Address.String(), DeviceName(dev.Address)
		if d.Taints = c.taints; c.fault.Kind != "" {
			d.Faults[id] = c.fault
		}
		if c.prepared {
			d.records = []claim.Record{prepared(id)}
		}
		got, _ := find(t, d.published(), name)
		text := ""
		for _, taint := range got.Taints {
			text += fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect)
		}
		if text != c.want {
			t.Errorf("%+v: %q", c, text)
		}
		d.taints = false
		if got, ok := find(t, d.published(), name); ok != c.left || len(got.Taints) > 0 {
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

// TestTimeAdded: a taint keeps its time while key, value and effect are unchanged, also after a restart and in another slice.
func TestTimeAdded(t *testing.T) {
	d, _ := machine(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
	dev := d.Pools[0].Devices[0]
	id, name := dev.Address.String(), DeviceName(dev.Address)
	d.Faults[id] = Fault{LinkDown, "x"}
	first, _ := find(t, d.published(), name)
	if first.Taints[0].TimeAdded == nil || !first.Taints[0].TimeAdded.Time.Equal(d.now) {
		t.Fatalf("%+v", first.Taints)
	}
	stored := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{*first.DeepCopy()}}}
	since := metav1.NewTime(d.now.Add(-time.Hour))
	stored.Spec.Devices[0].Taints[0].TimeAdded = &since
	d.former = formerDevices([]resourceapi.ResourceSlice{{}, stored})
	for _, c := range []struct {
		what   string
		change func(*desired)
		want   time.Time
	}{
		{"nothing", func(*desired) {}, since.Time},
		{"another effect", func(d *desired) { d.Taints.LinkDown = "NoExecute" }, d.now},
		{"another key", func(d *desired) { d.Faults = map[string]Fault{id: {"no-driver", "x"}} }, d.now},
		{"another PF name", func(d *desired) {
			d.Snapshot = &pci.Snapshot{Devices: slices.Clone(d.Snapshot.Devices), Nodes: d.Snapshot.Nodes}
			d.Snapshot.Devices[0].Interfaces = []string{"eth9"}
		}, d.now},
		{"no time", func(d *desired) {
			former := *stored.Spec.Devices[0].DeepCopy()
			former.Taints[0].TimeAdded = nil
			d.former = map[string]resourceapi.Device{name: former}
		}, d.now},
	} {
		changed := d
		c.change(&changed)
		got, _ := find(t, changed.published(), name)
		if len(got.Taints) != 1 || !got.Taints[0].TimeAdded.Time.Equal(c.want) {
			t.Errorf("%s: %+v, want %s", c.what, got.Taints, c.want)
		}
	}
}
