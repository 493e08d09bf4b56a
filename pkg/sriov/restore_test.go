// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestNamesInOrder: after an ADD that is killed while it removes alternative names, DEL restores them in their former order.
func TestNamesInOrder(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	l.add("a")
	l.addSysfsName(vf0, "net1")
	l.retrieveLink()
	must(t, l.host.AddAltName(l.link("net1"), "other-ens0f0v0"))
	l.del("a")
}

// TestPFGone: DEL succeeds although the VF's PF is not on the node. No pod gets the VF until the PF is back and the daemon, GC or the next
// ADD has restored the VF.
func TestPFGone(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	l.allocate(vf0)
	log := slog.New(slog.DiscardHandler)
	for _, finish := range []func(next testLab){
		func(testLab) { must(t, RestoreOrphans(l.sriov.sysfs, log)) },
		func(next testLab) { next.OK(next.collectStale()) },
		func(next testLab) { next.add("next"); next.OK(next.Call("DEL", "next")) },
	} {
		next := l.otherPod()
		l.add("a")
		l.changeJournal(vf0, func(j *Holding) { j.Former.PF = &kernel.VF{VLAN: 7} })
		const why = "its PF 0000:11:00.0 no longer reports the VF"
		if o := l.OK(l.Call("DEL", "a")); !strings.Contains(o.Log, "the VF is not fully restored") || !strings.Contains(o.Log, why) {
			t.Errorf("log: %s", o.Log)
		}
		l.OK(l.Call("DEL", "a"))
		if err := RestoreOrphans(l.sriov.sysfs, log); err == nil || !strings.Contains(err.Error(), why) {
			t.Error(err)
		}
		next.Fails(next.Call("ADD", "next"), plugin.CodeDevice, "restore VF 0000:11:02.0: "+why)
		if all, err := Holdings(); err != nil || len(all) != 1 || all[0].Unrestored != why {
			t.Errorf("%+v, %v", all, err)
		}
		l.changeJournal(vf0, func(j *Holding) { j.Former.PF = nil })
		finish(next)
		l.isGolden()
	}
}

// TestLimitsPending: while only the limits of an ended VF are missing, its driver stays as it is, which a claim may have bound since.
func TestLimitsPending(t *testing.T) {
	l := newLab(t)
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	a := address(t, vf0)
	must(t, RestoreLater(a, "iavf", pci.ErrNotLoaded))
	l.changeJournal(vf0, func(j *Holding) {
		j.Unrestored, j.LimitsPending, j.Rebind, j.Former.PF = "", true, true, &kernel.VF{MaxRate: 5000}
	})
	stays := func(driver string) {
		t.Helper()
		bound := l.boundAt(vf0)
		if err := RestoreOrphans(l.sriov.sysfs, slog.New(slog.DiscardHandler)); err == nil {
			t.Error("the PF is not on the node, and the limits are restored")
		}
		if l.driverOf(vf0) != driver || !l.boundAt(vf0).Equal(bound) {
			t.Errorf("driver %s, bound at %s, want %s, bound at %s", l.driverOf(vf0), l.boundAt(vf0), driver, bound)
		}
	}
	stays("iavf")
	must(t, pci.Bind(context.Background(), l.sriov.sysfs, a, "vfio-pci"))
	stays("vfio-pci")
	must(t, pci.Bind(context.Background(), l.sriov.sysfs, a, "iavf"), os.Remove(l.journalOf(vf0)))
}

// TestRestoreLaterAdds: the journal keeps what was not restored before the claim ended, once.
func TestRestoreLaterAdds(t *testing.T) {
	l := newLab(t)
	a := address(t, vf0)
	for _, why := range []string{"vlan 7: refused", "bind: not loaded", "bind: not loaded"} {
		must(t, RestoreLater(a, "iavf", errors.New(why)))
	}
	if all, err := Holdings(); err != nil || len(all) != 1 || all[0].Unrestored != "vlan 7: refused; bind: not loaded" {
		t.Errorf("%+v, %v", all, err)
	}
	must(t, os.Remove(l.journalOf(vf0)))
}

// TestRefusedSettings: the hint names each refused setting, and advises on rates only if one is refused.
func TestRefusedSettings(t *testing.T) {
	vlan := &kernel.VFError{Setting: "vlan 7", Err: syscall.EINVAL}
	rate := &kernel.VFError{Setting: "max_tx_rate 5000", Err: syscall.EINVAL}
	for want, err := range map[string]error{"'vlan 7'": errors.Join(vlan), "'vlan 7', 'max_tx_rate 5000'": errors.Join(vlan, rate)} {
		if got := refusedSettings(err); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
