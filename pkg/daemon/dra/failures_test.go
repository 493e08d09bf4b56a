// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// TestFailureClockJump sets the clock back by one day. A taint keeps its time and a claim record stays although both are in the future,
// and the claim can be unprepared.
func TestFailureClockJump(t *testing.T) {
	d, _ := inventoryOf(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
	dev := d.Pools[0].Devices[0]
	d.Faults[dev.Address.String()] = Fault{LinkDown, "x"}
	first, _ := findInSlices(t, d.publishedSlices(), DeviceName(dev.Address))
	future := metav1.NewTime(d.now.Add(24 * time.Hour))
	first.Taints[0].TimeAdded = &future
	d.former = devicesByName([]resourceslice.Slice{{Devices: []resourceapi.Device{first}}})
	if got, _ := findInSlices(t, d.publishedSlices(), DeviceName(dev.Address)); len(got.Taints) != 1 ||
		!got.Taints[0].TimeAdded.Equal(&future) {
		t.Errorf("%+v", got.Taints)
	}
	l := newDRALab(t)
	own := newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(own)
	l.writeKubeletFile(own)
	_, err := l.prepare(t.Context(), own)
	must(t, err)
	r, err := claim.Read(l.options.Claims, "c-1")
	r.Time = r.Time.Add(24 * time.Hour)
	must(t, err, claim.Write(l.options.Claims, r))
	c := &collector{Driver: l.Driver}
	for m := range 60 {
		c.collect(t.Context(), time.Now().Add(time.Duration(m)*time.Minute))
	}
	_, err = l.prepare(t.Context(), own)
	must(t, err)
	again, err := claim.Read(l.options.Claims, "c-1")
	if err != nil || !again.Time.Equal(r.Time) {
		t.Errorf("%+v, %v", again, err)
	}
	must(t, l.unprepare(t.Context(), "c-1"))
}

// TestFailureSameName has a claim with the name of an earlier one but another UID. It gets the VF only after the earlier one is
// unprepared, and the end of either does not affect the other.
func TestFailureSameName(t *testing.T) {
	l := newDRALab(t)
	old, same := newClaim("c-1", "web", deviceResult("a", vf0)), newClaim("c-2", "web", deviceResult("a", vf0))
	free := newClaim("c-3", "web", deviceResult("a", vf1))
	_, err := l.prepare(t.Context(), old)
	must(t, err)
	_, err = l.prepare(t.Context(), same)
	if err == nil || !strings.Contains(err.Error(), "VF "+vf0+" still belongs to claim shop/web (uid c-1)") {
		t.Errorf("got %v", err)
	}
	_, err = l.prepare(t.Context(), free)
	must(t, err, l.unprepare(t.Context(), "c-1"))
	if got := l.fileNames(l.options.Claims); got != "c-3" {
		t.Errorf("records: %s", got)
	}
	_, err = l.prepare(t.Context(), same)
	must(t, err, l.unprepare(t.Context(), "c-3"), l.unprepare(t.Context(), "c-2"))
}

// TestFailureAddressesChange gives the VFs other PCI addresses after a reset of the PF. The claim's old VF gets the taint "gone", the
// new ones are published, and the claim can be unprepared.
func TestFailureAddressesChange(t *testing.T) {
	l := newDRALab(t)
	own := newClaim("c-1", "web", deviceResult("a", vf3))
	_, err := l.prepare(t.Context(), own)
	must(t, err)
	pcitest.Remove(t, l.sysfs, vf3)
	l.repeatInventory()
	i := l.latestInventory()
	i.Taints = defaultTaints()
	l.Update(i)
	published := l.Published()
	if got := published[vf3].Taints; !slices.Equal(got, []string{"sriov.podlace.io/gone:NoExecute"}) || len(published) != 4 {
		t.Errorf("%d devices, taints %v", len(published), got)
	}
	if _, err := l.prepare(t.Context(), newClaim("c-2", "next", deviceResult("a", vf3))); err == nil || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("got %v", err)
	}
	must(t, l.unprepare(t.Context(), "c-1"))
	if published := l.Published(); len(published) != 3 {
		t.Errorf("%d devices", len(published))
	}
}

// TestFailureOtherProgram checks that a VF whose interface another program has moved to another namespace is tainted "held" and not
// allocated.
func TestFailureOtherProgram(t *testing.T) {
	l := newDRALab(t, func(o *Options) {
		o.InUse = func(id string) string { return map[string]string{vf0: "has its interface in another namespace"}[id] }
	})
	i := l.latestInventory()
	i.Taints, i.Faults = defaultTaints(), map[string]Fault{vf0: {Held, "its interface is in another namespace"}}
	l.Update(i)
	if got := l.Published()[vf0].Taints; !slices.Equal(got, []string{"sriov.podlace.io/held:NoSchedule"}) {
		t.Errorf("taints %v", got)
	}
	_, err := l.prepare(t.Context(), newClaim("c-1", "web", deviceResult("a", vf0)))
	if err == nil || !strings.Contains(err.Error(), "VF "+vf0+" has its interface in another namespace") {
		t.Errorf("got %v", err)
	}
	if got := l.fileNames(l.options.Claims); got != "" {
		t.Errorf("records: %s", got)
	}
}

// TestDriverLost checks that the next Prepare binds the driver that a claim's VF has lost, for example after a reset of the PF.
func TestDriverLost(t *testing.T) {
	l := newDRALab(t)
	pcitest.Kernel{}.Start(t, l.sysfs)
	c := newClaim("c-1", "web", deviceResult("a", vf0))
	l.updateInventory(pool.Resource{API: pool.DRA, Driver: "vfio-pci"}, nil)
	_, err := l.prepare(t.Context(), c)
	must(t, err)
	before, err := claim.Read(l.options.Claims, "c-1")
	a, _ := pci.ParseAddress(vf0)
	must(t, err, pci.Bind(t.Context(), l.sysfs, a, "iavf"))
	l.updateInventory(pool.Resource{API: pool.DRA, Driver: "vfio-pci"}, nil)
	_, err = l.prepare(t.Context(), c)
	must(t, err)
	r, err := claim.Read(l.options.Claims, "c-1")
	if diff := cmp.Diff(before, r); diff != "" || err != nil || l.driverOf(vf0) != "vfio-pci" {
		t.Errorf("driver %s, %v\n%s", l.driverOf(vf0), err, diff)
	}
}

// TestDriverUnloaded: a claim can be unprepared although the former driver of its VF is not loaded any more. No claim gets the VF until
// the driver is back and the daemon or the next Prepare has restored it.
func TestDriverUnloaded(t *testing.T) {
	l := newDRALab(t)
	pcitest.Kernel{}.Start(t, l.sysfs)
	driver := filepath.Join(l.sysfs, "bus/pci/drivers/iavf")
	next := newClaim("c-2", "next", deviceResult("a", vf0))
	for name, finish := range map[string]func() error{
		"daemon": func() error { return sriov.RestoreOrphans(l.sysfs, l.options.Log) },
		"Prepare": func() error {
			_, err := l.prepare(t.Context(), next)
			return errors.Join(err, l.unprepare(t.Context(), "c-2"))
		},
	} {
		p := l.planFor(t, "c-1", vf0)
		p.devices[0].driver, p.devices[0].restores = "vfio-pci", true
		must(t, l.reserve(t.Context(), &p, nil), os.Rename(driver, driver+".unloaded"), l.unprepare(t.Context(), "c-1"))
		for what, err := range map[string]error{
			"the daemon": sriov.RestoreOrphans(l.sysfs, l.options.Log),
			"Prepare":    func() error { _, err := l.prepare(t.Context(), next); return err }(),
		} {
			if err == nil || !strings.Contains(err.Error(), "restore VF "+vf0+": bind "+vf0+" to iavf: the driver is not loaded") {
				t.Errorf("%s: %v", what, err)
			}
		}
		held, err := sriov.Holdings()
		if err != nil || len(held) != 1 || !held[0].Ended || l.driverOf(vf0) != "vfio-pci" || l.fileNames(l.options.Claims) != "" {
			t.Errorf("%+v, %v, driver %s, records %s", held, err, l.driverOf(vf0), l.fileNames(l.options.Claims))
		}
		must(t, os.Rename(driver+".unloaded", driver), finish())
		if held, err := sriov.Holdings(); err != nil || len(held) > 0 || l.driverOf(vf0) != "iavf" {
			t.Errorf("%s: %+v, %v, driver %s", name, held, err, l.driverOf(vf0))
		}
	}
	if got := strings.Count(l.log.String(), "the VF cannot be used until its former driver is bound"); got != 2 {
		t.Errorf("%d warnings: %s", got, l.log.String())
	}
}
