// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
)

func (l testLab) driverOf(address string) string {
	target, _ := os.Readlink(filepath.Join(l.sriov.sysfs, "bus/pci/devices", address, "driver"))
	return filepath.Base(target)
}

// boundAt returns when a VF's driver was last bound.
func (l testLab) boundAt(address string) time.Time {
	info, err := os.Lstat(filepath.Join(l.sriov.sysfs, "bus/pci/devices", address, "driver"))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// onBinding calls f once, when the VF's network driver is bound again or else when the test ends.
func (l testLab) onBinding(address string, f func(net string)) {
	l.Helper()
	net, before := filepath.Join(pcitest.Folder(l.T, l.sriov.sysfs, address), "net"), l.boundAt(address)
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-end:
				return
			case <-time.After(time.Millisecond):
			}
			if at := l.boundAt(address); l.driverOf(address) == "iavf" && !at.IsZero() && !at.Equal(before) {
				f(net)
				return
			}
		}
	}()
	l.Cleanup(func() { close(end); <-done })
}

// TestDriver: a VF for a user space program has no interface in the pod, and DEL binds its former driver again.
func TestDriver(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t, "driver", "vfio-pci")
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	l.allocate(vf0)
	l.onBinding(vf0, func(net string) { _ = os.MkdirAll(filepath.Join(net, "ens0f0v0"), 0o755) })
	a := l.add("a")
	if i := a.result.Interfaces; len(i) != 2 || i[1].PciID != vf0 || i[1].Name != "net1" || l.driverOf(vf0) != "vfio-pci" {
		t.Errorf("%s, driver %s", a.prev, l.driverOf(vf0))
	}
	l.OK(a.check())
	b := l.otherPod()
	b.Fails(b.Call("ADD", "b"), plugin.CodeDevice, "VF 0000:11:02.0: pod shop/web-0 has it since ")
	l.del("a")
	if l.driverOf(vf0) != "iavf" {
		t.Error(l.driverOf(vf0))
	}
	l.Fails(l.Call("ADD", "a", "driver", "mlx9"), plugin.CodeDevice, "driver: bind 0000:11:02.0 to mlx9: the driver is not loaded")
	l.Fails(l.Call("ADD", "a", "mac", "02:00:00:00:00:01", "driver", "nosuch"), plugin.CodeDevice, "is not loaded")
	l.isGolden()
}

// TestRebind: if the configuration asks for it, DEL rebinds the VF's driver. The interface then has its former settings.
func TestRebind(t *testing.T) {
	l := newLab(t, "rebind", true)
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	l.allocate(vf0)
	l.add("a")
	bound := l.boundAt(vf0)
	l.onBinding(vf0, func(net string) { must(t, os.MkdirAll(filepath.Join(net, "ens0f0v0"), 0o755)) })
	l.changeAsTenant("net1")
	l.del("a", "rebind", nil) // the journal requires the rebind
	if at := l.boundAt(vf0); at.Equal(bound) || l.driverOf(vf0) != "iavf" {
		t.Errorf("bound at %s, before at %s, driver %s", at, bound, l.driverOf(vf0))
	}
}

// collectStale runs GC for a journal from long ago.
func (l testLab) collectStale() outcome {
	l.Helper()
	text, err := os.ReadFile(l.journalOf(vf0))
	must(l, err, os.WriteFile(l.journalOf(vf0), regexp.MustCompile(`"since":"\d+`).ReplaceAll(text, []byte(`"since":"2020`)), 0o600))
	return l.Call("GC", "", "prevResult", nil, "cni.dev/valid-attachments", []any{})
}

// TestDriverUnloaded: DEL succeeds although the VF's former driver is not loaded any more. No pod gets the VF until the driver is back and
// the daemon, GC or the next ADD has restored it.
func TestDriverUnloaded(t *testing.T) {
	kerneltest.Slow(t)
	for name, node := range map[string]func(*testing.T, ...any) testLab{"VF": newLab, "no PF": newGuest} {
		t.Run(name, func(t *testing.T) {
			l := node(t, "ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.61.0.0/24"}}}})
			pcitest.Set(t, l.sriov.sysfs, "0000:11:00.0", "sriov_numvfs", map[string]string{"VF": "4", "no PF": "3"}[name])
			pcitest.Kernel{}.Start(t, l.sriov.sysfs)
			*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, vf0)}
			l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
			driver := filepath.Join(l.sriov.sysfs, "bus/pci/drivers/iavf")
			log := slog.New(slog.DiscardHandler)
			for _, finish := range []func(next testLab){
				func(testLab) { must(t, RestoreOrphans(l.sriov.sysfs, log)) },
				func(next testLab) { next.OK(next.collectStale()) },
				func(next testLab) { next.add("next"); next.OK(next.Call("DEL", "next")) },
				func(testLab) { must(t, FreeOrphan(l.sriov.sysfs, address(t, vf0), "c-0", log)) },
			} {
				next := l.otherPod()
				l.add("a", "driver", "vfio-pci")
				must(t, os.Rename(driver, driver+".unloaded"))
				must(t, RestoreClaim(l.sriov.sysfs, "c-0", nil, log))
				if o := l.OK(l.Call("DEL", "a")); !strings.Contains(o.Log, "the VF is not fully restored") {
					t.Errorf("log: %s", o.Log)
				}
				l.OK(l.Call("DEL", "a"))
				l.OK(l.collectStale())
				if err := RestoreOrphans(l.sriov.sysfs, log); err == nil || !strings.Contains(err.Error(), "bind 0000:11:02.0 to iavf: the driver is not loaded") {
					t.Error(err)
				}
				next.Fails(next.Call("ADD", "next"), plugin.CodeDevice, "restore VF 0000:11:02.0: bind 0000:11:02.0 to iavf: the driver is not loaded")
				if err := FreeOrphan(l.sriov.sysfs, address(t, vf0), "c-0", log); err == nil {
					t.Error("a claim can have the VF")
				}
				left, _ := filepath.Glob("/var/lib/cni/networks/net.vf/10.*")
				if all, err := Holdings(); err != nil || len(all) != 1 || !all[0].Ended || all[0].Claim != nil || len(left) > 0 {
					t.Errorf("%+v, %v, leases %v", all, err, left)
				}
				must(t, os.Rename(driver+".unloaded", driver))
				l.onBinding(vf0, func(net string) { _ = os.MkdirAll(filepath.Join(net, "ens0f0v0"), 0o755) })
				finish(next)
				l.isGolden()
			}
		})
	}
}

// TestClaimDriverUnloaded: no pod gets a VF whose claim ended without its former driver, until the next ADD has restored that.
func TestClaimDriverUnloaded(t *testing.T) {
	l := newLab(t)
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	l.allocate(vf0)
	must(t, RestoreLater(address(t, vf0), "mlx9", pci.ErrNotLoaded))
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "restore VF 0000:11:02.0: bind 0000:11:02.0 to mlx9: the driver is not loaded")
	l.OK(l.Call("DEL", "a"))
	l.OK(l.collectStale())
	out, err := l.runReset(vf0, false, nil)
	if want := "VF 0000:11:02.0 has the settings of an ended claim: restore its former settings\n"; err != nil || !strings.HasPrefix(out, want) {
		t.Errorf("%s, %v", out, err)
	}
	must(t, RestoreLater(address(t, vf0), "iavf", pci.ErrNotLoaded))
	l.add("a")
	l.del("a")
	l.isGolden()
}
