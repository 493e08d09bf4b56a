// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/plugin"
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
