// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestIGBWithoutPF attaches a real card that is neither VF nor PF, with its network driver and with vfio-pci, and restores it.
func TestIGBWithoutPF(t *testing.T) {
	l := newIGB(t, "ipam", object{"type": "host-local", "subnet": "10.7.0.0/24"}, "reportIPs", true)
	lone := os.Getenv("PODLACE_LONE")
	address, err := pci.ParseAddress(lone)
	must(t, err)
	d, err := pci.Inspect(pci.Sysfs, address)
	must(t, err)
	t.Logf("%s:%s, driver %s, NUMA node %d, interfaces %v", d.Vendor, d.Product, d.Driver, d.NUMANode, d.Interfaces)
	if !d.HasNoPF() || len(d.Interfaces) != 1 || d.NUMANode != 1 {
		t.Fatalf("%+v", d)
	}
	name := d.Interfaces[0]
	was := describe(l.link(name))
	l.allocate(lone)
	restored := func() {
		t.Helper()
		l.del("a")
		kerneltest.Await(t, "the interface is back", func() bool { _, ok, err := l.host.Link(name); return err == nil && ok })
		if now := describe(l.link(name)); now != was {
			t.Errorf("the interface is %s\nbefore: %s", now, was)
		}
	}
	a := l.add("a", "mac", "02:00:00:00:aa:07", "mtu", 1400)
	i := a.result.Interfaces
	if len(i) != 2 || i[1].Mac != "02:00:00:00:aa:07" || i[1].Mtu != 1400 || i[1].PciID != lone || len(a.result.IPs) != 1 {
		t.Errorf("%s", a.prev)
	}
	t.Logf("%s", a.prev)
	l.OK(a.check())
	restored()

	a = l.add("a", "driver", "vfio-pci")
	if i := a.result.Interfaces; len(i) != 2 || i[1].Mac != "52:54:00:00:02:01" || l.driverOf(lone) != "vfio-pci" || len(a.result.IPs) != 1 {
		t.Errorf("driver %s, %s", l.driverOf(lone), a.prev)
	}
	t.Logf("%s", a.prev)
	group, err := filepath.EvalSymlinks(filepath.Join(pci.Sysfs, "bus/pci/devices", lone, "iommu_group"))
	must(t, err)
	f, err := os.OpenFile("/dev/vfio/"+filepath.Base(group), os.O_RDWR, 0)
	must(t, err, f.Close())
	l.OK(a.check())
	restored()

	l.Fails(l.Call("ADD", "a", "vlan", 100), plugin.CodeKernelFeature, "cannot set vlan: function "+lone+" has no PF on this node")
	l.Fails(l.Call("ADD", "a", "driver", "vfio-pci", "mac", "02:00:00:00:aa:07"), plugin.CodeKernelFeature, "cannot set mac: function "+lone)
	restored()
}

// TestIGBDriverUnloaded: DEL succeeds after 'modprobe -r' of the former driver, and the daemon restores the function once it is back.
func TestIGBDriverUnloaded(t *testing.T) {
	l := newIGB(t)
	lone := os.Getenv("PODLACE_LONE")
	d, err := pci.Inspect(pci.Sysfs, address(t, lone))
	must(t, err)
	if len(d.Interfaces) != 1 {
		t.Fatalf("%+v", d)
	}
	was, log := describe(l.link(d.Interfaces[0])), slog.New(slog.DiscardHandler)
	l.allocate(lone)
	l.add("a", "driver", "vfio-pci")
	must(t, unix.DeleteModule(d.Driver, 0))
	o := l.OK(l.Call("DEL", "a"))
	t.Logf("DEL: %s", o.Log)
	t.Logf("the daemon: %v", RestoreOrphans(pci.Sysfs, log))
	o = l.Call("ADD", "b")
	l.Fails(o, plugin.CodeDevice, "restore VF "+lone+": bind "+lone+" to "+d.Driver+": the driver is not loaded")
	t.Logf("ADD: %s", o.Stdout)
	modules, err := filepath.Glob("/lib/modules/*/kernel/drivers/net/ethernet/intel/" + d.Driver + "/*.ko")
	if err != nil || len(modules) != 1 {
		t.Fatalf("%v, %v", modules, err)
	}
	f, err := os.Open(modules[0])
	must(t, err, unix.FinitModule(int(f.Fd()), "", 0), f.Close(), RestoreOrphans(pci.Sysfs, log))
	if now := describe(l.link(d.Interfaces[0])); now != was {
		t.Errorf("the interface is %s\nbefore: %s", now, was)
	}
	l.add("b")
	l.del("b")
}
