// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
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
