// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// newGuest returns a lab whose node is a virtual machine: vf0 is there without its PF.
func newGuest(t *testing.T, keys ...any) testLab {
	t.Helper()
	l := newLab(t, keys...)
	pcitest.Passthrough(t, l.sriov.sysfs, vf0)
	l.allocate(vf0)
	return l
}

// TestWithoutPF checks that a pod gets a function without a PF with all that needs none, and that DEL restores it.
func TestWithoutPF(t *testing.T) {
	kerneltest.Slow(t)
	l := newGuest(t, "ifName", "fast{index}", "ipam", object{"type": "host-local", "subnet": "10.7.0.0/24"}, "reportIPs", true, "mtu", 1300,
		"mac", "02:00:00:00:00:07")
	a := l.add("a")
	i := a.result.Interfaces
	if len(i) != 2 || i[1].Name != "fast1" || i[1].Mac != "02:00:00:00:00:07" || i[1].Mtu != 1300 || i[1].PciID != vf0 ||
		len(a.result.IPs) != 2 || a.result.IPs[1].Address.String() != "10.7.0.2/24" {
		t.Errorf("%+v", a.result)
	}
	l.OK(a.check())
	l.del("a")
}

// TestSettingsWithoutPF checks that ADD refuses the settings of the table before any change.
func TestSettingsWithoutPF(t *testing.T) {
	kerneltest.Slow(t)
	l := newGuest(t)
	for _, s := range pcitest.SettingsWithoutPF() {
		for driver, key := range map[string]string{"": s.Interface, "vfio-pci": s.Userspace} {
			if driver != "" && key == "" { // needs a kernel that binds it
				continue
			}
			c := &vfconfig.Config{}
			must(t, json.Unmarshal([]byte("{"+s.JSON+"}"), c))
			l.allocate(vf0)
			(*l.devices)[0].Config = c
			var keys []any
			if driver != "" {
				keys = []any{"driver", driver}
			}
			if o := l.Call("ADD", "a", keys...); key != "" {
				l.Fails(o, plugin.CodeKernelFeature, "cannot set "+key+" ")
				l.Fails(o, plugin.CodeKernelFeature, ": function "+vf0+" has no PF on this node, which alone can set it")
			} else {
				l.OK(o)
			}
			l.del("a")
		}
	}
	l.allocate(vf0)
	l.Fails(l.Call("ADD", "a", "spoofchk", "on"), plugin.CodeKernelFeature, `cannot set spoofchk: function `+vf0+" has no PF")
	l.del("a")
	for rate, says := range map[int]string{100: "the limit of the annotation kubernetes.io/egress-bandwidth", 5: "max_tx_rate"} {
		o := l.Call("ADD", "a", "prevResult", nil, "max_tx_rate", rate, "runtimeConfig", object{"bandwidth": object{"egressRate": 10_000_000}})
		l.Fails(o, plugin.CodeKernelFeature, "cannot set "+says+": function "+vf0+" has no PF")
		l.del("a", "prevResult", nil)
	}
}

// TestSettingsOfWholePF checks that ADD refuses the settings of the table for a PF that a claim has as a whole.
func TestSettingsOfWholePF(t *testing.T) {
	kerneltest.Slow(t)
	const pf = "0000:11:00.0"
	l := newLab(t)
	_, err := l.host.AddVeth(kernel.Veth{Host: "ens0f0", Pod: "ens0f0peer", MTU: 1500})
	must(t, err)
	t.Cleanup(func() { must(t, l.host.DelLink("ens0f0"), l.host.DelLink("ens0f0peer")) })
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	must(t, pci.SetNumVFs(t.Context(), l.sriov.sysfs, address(t, pf), 0))
	for _, s := range pcitest.SettingsWithoutPF() {
		d := claimedDevice("c-0", "a", 0, pf)
		d.Config = &vfconfig.Config{}
		must(t, json.Unmarshal([]byte("{"+s.JSON+"}"), d.Config))
		*l.devices = []poddevices.Device{d}
		l.prepareClaims(t.TempDir(), "u-0", d)
		if o := l.Call("ADD", "a"); s.Interface != "" {
			l.Fails(o, plugin.CodeKernelFeature, "cannot set "+s.Interface+" ")
			l.Fails(o, plugin.CodeKernelFeature, ": function "+pf+" is a PF, and only VFs have this setting")
		} else {
			l.OK(o)
		}
		l.OK(l.Call("DEL", "a"))
	}
}

// TestFunctionInUse checks that ADD takes no function without a PF from the node that uses it, although the device plugin handed it out.
func TestFunctionInUse(t *testing.T) {
	kerneltest.Slow(t)
	l := newGuest(t)
	link := l.link("ens0f0v0")
	prefix, net := netip.MustParsePrefix("192.0.2.7/24"), filepath.Join(pcitest.Folder(t, l.sriov.sysfs, vf0), "net/ens0f0v0")
	undo := func(f func() error) func() { return func() { must(t, f()) } }
	for says, use := range map[string]func() func(){
		"ens0f0v0 has the address 192.0.2.7/24": func() func() {
			must(t, l.host.AddAddress(link, prefix, false))
			return undo(func() error { return l.host.DelAddress(link, prefix) })
		},
		"ens0f0v0 is up": func() func() {
			must(t, l.host.SetUp(link))
			return undo(func() error { return l.host.SetDown(link) })
		},
		"its interface is in another network namespace": func() func() {
			must(t, os.Rename(filepath.Dir(net), filepath.Dir(net)+".away"))
			return undo(func() error { return os.Rename(filepath.Dir(net)+".away", filepath.Dir(net)) })
		},
		"is of a virtio card": func() func() {
			driver := filepath.Join(filepath.Dir(filepath.Dir(net)), "driver")
			was, err := os.Readlink(driver)
			must(t, err, os.Remove(driver), os.Symlink("../../bus/pci/drivers/virtio-pci", driver))
			return undo(func() error { return errors.Join(os.Remove(driver), os.Symlink(was, driver)) })
		},
	} {
		after := use()
		o := l.Call("ADD", "a")
		after()
		l.Fails(o, plugin.CodeDevice, "PCI function "+vf0+" is in use on the node: ")
		l.Fails(o, plugin.CodeDevice, says)
		if !strings.Contains(string(o.Stdout), "exclude the VF by the selectors") {
			t.Errorf("no hint: %s", o.Stdout)
		}
		l.del("a")
	}
}
