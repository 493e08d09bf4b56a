// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/pci"
)

// changeJournal changes the journal of a VF.
func (l testLab) changeJournal(vf string, change func(*Holding)) {
	l.Helper()
	h, err := lock(address(l, vf))
	must(l, err)
	defer h.close()
	j, ok, err := h.load()
	if err != nil || !ok {
		l.Fatalf("journal %t, %v", ok, err)
	}
	change(&j)
	must(l, h.save(j))
}

// TestIGBRateRefused: DEL and the next ADD succeed although the PF's driver refuses the former rate, as the link is slower than before.
// Once it accepts the rate, the VF is restored.
func TestIGBRateRefused(t *testing.T) {
	l := newIGB(t)
	vf, log := l.second(), slog.New(slog.DiscardHandler)
	fasterBefore := func(j *Holding) { j.Former.PF.MaxRate = 5000 }
	pending := func(when string) {
		t.Helper()
		if all, err := Holdings(); err != nil || len(all) != 1 || !all[0].limitsPending() || all[0].Former.PF.MaxRate != 5000 {
			t.Errorf("%s: %+v, %v", when, all, err)
		}
	}
	l.add("a", "max_tx_rate", 100)
	l.changeJournal(vf, fasterBefore)
	if o := l.OK(l.Call("DEL", "a")); !strings.Contains(o.Log, "the VF is not fully restored") ||
		!strings.Contains(o.Log, "max_tx_rate 5000: invalid argument") {
		t.Errorf("log: %s", o.Log)
	}
	pending("after DEL")
	if err := RestoreOrphans(l.sriov.sysfs, log); err == nil || !strings.Contains(err.Error(), "max_tx_rate 5000: invalid argument") {
		t.Errorf("the daemon: %v", err)
	}
	next := l.otherPod()
	if o := next.OK(next.Call("ADD", "b")); !strings.Contains(o.Log, "keeps a rate or the link state of an earlier pod") {
		t.Errorf("log: %s", o.Log)
	}
	next.OK(next.Call("DEL", "b"))
	pending("after the next pod")
	l.changeJournal(vf, func(j *Holding) { j.Former.PF.MaxRate = 500 })
	must(t, RestoreOrphans(l.sriov.sysfs, log))
	l.isGolden()

	l.add("c", "max_tx_rate", 100)
	l.changeJournal(vf, fasterBefore)
	l.OK(l.Call("DEL", "c"))
	l.keepsWhileLimitsPend(vf, log)
	out, err := l.runReset(vf, true, nil)
	if all, e := Holdings(); err != nil || e != nil || len(all) > 0 || l.asPF(1).MaxRate != 0 {
		t.Errorf("reset: %s, %v, %v, %+v", out, err, e, all)
	}
}

// keepsWhileLimitsPend checks that the daemon changes neither the driver nor the MAC of a VF whose limits are pending.
func (l igb) keepsWhileLimitsPend(vf string, log *slog.Logger) {
	l.Helper()
	before := l.asPF(1)
	l.changeJournal(vf, func(j *Holding) { j.Former.PF.MAC = make(net.HardwareAddr, 6) })
	must(l, pci.Bind(context.Background(), l.sriov.sysfs, address(l, vf), ""))
	if err := RestoreOrphans(l.sriov.sysfs, log); err == nil || l.driverOf(vf) == "igbvf" || !bytes.Equal(l.asPF(1).MAC, before.MAC) {
		l.Errorf("%v, driver %s, %s, want %s", err, l.driverOf(vf), formatVF(l.asPF(1)), formatVF(before))
	}
	l.changeJournal(vf, func(j *Holding) { j.Former.PF.MAC = before.MAC })
	must(l, pci.Bind(context.Background(), l.sriov.sysfs, address(l, vf), "igbvf"))
	kerneltest.Await(l.T, "the VF has an interface", func() bool { _, ok, _ := l.host.LinkOf(vf); return ok })
}

// inject runs DEL with a failure of its nth change. It returns the change, or "" if DEL makes fewer.
func (l igb) inject(at int, id string) (o outcome, op string) {
	l.Helper()
	o, _ = l.runWithFault("PODLACE_FAIL_AT=%d", at, "DEL", id, everySetting()...)
	found := regexp.MustCompile(`injected fault at change \d+ \(([^)]*)\)`).FindStringSubmatch(string(o.Stdout) + o.Log)
	if found == nil {
		return o, ""
	}
	return o, found[1]
}

// TestIGBRestoreRefused: the PF's driver refuses to restore one setting, each in turn. DEL succeeds, the error names the setting, and no
// pod may have the VF while another setting than a rate is missing.
func TestIGBRestoreRefused(t *testing.T) {
	l := newIGB(t)
	l.first()
	var refused []string
	for at := 1; ; at++ {
		l.add("a", everySetting()...)
		o, op := l.inject(at, "a")
		if op == "" {
			break
		}
		if _, setting, ok := strings.Cut(op, " vf 0 "); ok {
			refused = append(refused, setting)
			all, err := Holdings()
			if isRate := strings.Contains(setting, "_rate"); o.Exit != 0 || err != nil || len(all) != 1 || all[0].limitsPending() != isRate ||
				!isRate && !strings.Contains(all[0].Unrestored, setting) {
				t.Errorf("%s: %+v, %+v, %v", setting, o, all, err)
			}
		}
		must(t, RestoreOrphans(l.sriov.sysfs, slog.New(slog.DiscardHandler)))
		l.OK(l.Call("DEL", "a", everySetting()...))
		if dirt := l.findResidue(0); dirt != "" {
			t.Fatalf("%s: %s", op, dirt)
		}
	}
	if len(refused) != 3 {
		t.Errorf("refused %q", refused)
	}
	l.isGolden()
}

// TestIGBMACRefused: the PF's driver does not delete the MAC of a pod, so the PF stores that of the VF's interface, and the next pod can
// get the VF and a MAC.
func TestIGBMACRefused(t *testing.T) {
	l := newIGB(t)
	vf := l.first()
	was := l.asPF(0)
	for at := 1; ; at++ {
		l.add("a", everySetting()...)
		l.changeJournal(vf, func(j *Holding) { j.Former.PF.MAC = make(net.HardwareAddr, 6) })
		o, op := l.inject(at, "a")
		if strings.HasSuffix(op, " vf 0 mac 00:00:00:00:00:00") {
			l.OK(o)
			break
		}
		must(t, RestoreOrphans(l.sriov.sysfs, slog.New(slog.DiscardHandler)))
		l.OK(l.Call("DEL", "a", everySetting()...))
		if op == "" {
			t.Fatal("DEL does not delete the MAC")
		}
	}
	if all, err := Holdings(); err != nil || len(all) > 0 || !bytes.Equal(l.asPF(0).MAC, was.MAC) {
		t.Errorf("%+v, %v, %s", all, err, formatVF(l.asPF(0)))
	}
	l.isGolden()
	if i := l.add("b", "mac", "02:00:00:00:aa:02").result.Interfaces; i[1].Mac != "02:00:00:00:aa:02" {
		t.Errorf("%+v", i)
	}
	l.del("b")
	l.isGolden()
}
