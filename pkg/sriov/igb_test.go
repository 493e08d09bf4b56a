// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// igb is a test lab with the VFs of an Intel card that QEMU emulates, as in "make vm".
type igb struct {
	testLab
	nic kerneltest.NIC
}

// newIGB creates the VFs again, the first with the kernel's default settings, the second with an admin's.
func newIGB(t *testing.T, keys ...any) igb {
	t.Helper()
	pf := kerneltest.RealPF(t)
	must(t, os.RemoveAll(store.Root), os.RemoveAll("/var/lib/cni"), os.MkdirAll(filepath.Dir(poddevices.Socket), 0o755))
	kerneltest.SetNumVFs(t, pf, 0)
	host, err := kernel.Host()
	must(t, err)
	t.Cleanup(host.Close)
	l := igb{testLab: unsetLab(t, host)}
	// A PF that is set up forgets the MACs of its VFs until their drivers report them again. IPv6 is disabled on it because the kernel
	// could set its multicast addresses at any time, at which the igb driver of Linux 6.12 crashes while VFs are removed.
	must(t, host.Set(kernel.Sysctl{Path: "ipv6/conf/" + l.pf().Name + "/disable_ipv6", Value: "1"}), host.SetUp(l.pf()))
	kerneltest.Await(t, "the PF has a carrier", func() bool { return l.pf().Runs })
	l.nic = kerneltest.RealNIC(t, 2)
	t.Cleanup(func() { kerneltest.SetNumVFs(t, pf, 0) })
	for i, f := range l.nic.VFs { // a driver that was faster than the PF must report its MAC again
		if told := l.asPF(i).MAC; bytes.Equal(told, make([]byte, len(told))) {
			link := l.link(f.Name)
			must(t, host.SetUp(link), host.SetDown(link))
		}
		kerneltest.Await(t, "the PF knows the MAC of "+f.Name, func() bool { return bytes.Equal(l.asPF(i).MAC, l.link(f.Name).MAC) })
	}
	l.Pod = kerneltest.NewPod(t)
	*l.sriov = sriov{ipam.Runner{Builtin: []plugin.Plugin{hostlocal.Plugin()}}, pci.Sysfs, poddevices.Socket, claim.Folder}
	l.serveSocket()
	l.Conf = object{"cniVersion": "1.1.0", "name": "net", "type": "sriov", "resources": []string{fast}, "kubeletDir": "/run/no-kubelet",
		"prevResult": object{"cniVersion": "1.1.0", "interfaces": []any{object{"name": "eth0", "sandbox": l.Pod.Path}}}}.With(keys...)
	l.asAdmin()
	l.card = l.cardNow
	l.golden = l.nodeLinks()
	return l
}

// asAdmin changes settings of the VFs as an admin would.
func (l igb) asAdmin() {
	l.Helper()
	first, second := l.link(l.nic.VFs[0].Name), l.link(l.nic.VFs[1].Name)
	must(l, l.host.AddAltName(first, "alt-first"), l.host.SetAlias(second, "of the lab"), l.host.AddAltName(second, "alt-second"),
		l.host.AddAltName(second, "other-second"), l.host.SetMTU(second, 1450), l.host.SetAllMulti(second, true))
	before := l.asPF(1)
	want := before
	want.VLAN, want.QoS, want.SpoofCheck, want.MaxRate = 7, 2, new(false), 500
	must(l, l.host.SetVF(l.pf(), 1, before, want), l.host.SetUp(second))
}

func (l igb) pf() kernel.Link {
	l.Helper()
	return l.link(kerneltest.Interface(l.T, kerneltest.RealPF(l.T)))
}

func (l igb) asPF(index int) kernel.VF {
	l.Helper()
	vf, ok, err := l.host.VF(l.pf(), index)
	if err != nil || !ok {
		l.Fatalf("VF %d: %t, %v", index, ok, err)
	}
	return vf
}

// cardNow describes each VF: driver, settings on the PF, and interface if that is on the node.
func (l igb) cardNow() string {
	l.Helper()
	var b strings.Builder
	for i, f := range l.nic.VFs {
		link, ok, err := l.host.LinkOf(f.Device)
		must(l, err)
		override, err := os.ReadFile(filepath.Join(pci.Sysfs, "bus/pci/devices", f.Device, "driver_override"))
		must(l, err)
		fmt.Fprintf(&b, "%s %s override %s home %t %s, %s\n", f.Device, l.driverOf(f.Device), strings.TrimSpace(string(override)), ok,
			describe(link), formatVF(l.asPF(i)))
	}
	return b.String()
}

func (l igb) otherPod() igb {
	l.Helper()
	l.testLab = l.testLab.otherPod()
	return l
}

func (l igb) forSubtest(t *testing.T) igb {
	l.T = t
	l.card = l.cardNow
	return l
}

// first and second allocate the first or the second VF to the pod.
func (l igb) first() string {
	l.allocate(l.nic.VFs[0].Device)
	return l.nic.VFs[0].Device
}

func (l igb) second() string {
	l.allocate(l.nic.VFs[1].Device)
	return l.nic.VFs[1].Device
}

// changeAll makes every change to the pod's interface that a tenant can make, and returns the kernel's error for that of the MAC.
func (l igb) changeAll(name string) (mac error) {
	l.Helper()
	l.changeAsTenant(name)
	l.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link(name)
		must(l, err)
		mac = pod.SetMAC(link, net.HardwareAddr{2, 0, 0, 0, 0xbb, 1})
		must(l, pod.SetDown(link), pod.Rename(link, "mine"), pod.SetUp(link))
	})
	return mac
}

// isDefault checks that a pod's interface without configured settings is as on the node, except for its names.
func (l igb) isDefault(name string, index int) {
	l.Helper()
	var was string
	for i, line := range strings.Split(l.golden, "\n") {
		if i == index {
			was = line
		}
	}
	link := l.podLink(name)
	now := fmt.Sprintf("%q mac %s mtu %d promisc %t allmulti %t txqueuelen %d up true %+v, %s", link.Alias, link.MAC, link.MTU, link.Promis,
		link.AllMulti, link.TxQueue, link.Traits, formatVF(l.asPF(index)))
	if i := strings.Index(was, `] "`); i < 0 || strings.Replace(was[i+2:], "up false", "up true", 1) != now || len(link.AltNames) > 0 ||
		link.Name != name {
		l.Errorf("the pod has %q %q, %s; on the node it was %s", link.Name, link.AltNames, now, was)
	}
}

// TestIGBLife reads back every setting that the driver of real VFs supports. DEL restores the VFs after any changes by a tenant.
func TestIGBLife(t *testing.T) {
	l := newIGB(t)
	const admin = "02:00:00:00:aa:01"
	keys := []any{"vlan", 100, "vlanQoS", 3, "mac", admin, "spoofchk", "off", "trust", "on", "max_tx_rate", 100, "mtu", 1400, "ifName",
		"fast{index}"}
	for index, vf := range []string{l.first(), l.second()} {
		l.allocate(vf)
		for _, id := range []string{"a", "b"} {
			a := l.add(id, keys...)
			if i := a.result.Interfaces; len(i) != 2 || i[1].Name != "fast1" || i[1].PciID != vf || i[1].Mac != admin || i[1].Mtu != 1400 {
				t.Errorf("%s", a.prev)
			}
			if got, want := formatVF(l.asPF(index)), "mac "+admin+
				" vlan 100 qos 3 proto 802.1q spoofchk off trust on state auto min_tx_rate 0 max_tx_rate 100"; got != want {
				t.Errorf("PF: %s, want %s", got, want)
			}
			if got := l.podLink("fast1"); got.Device != vf || got.MTU != 1400 || got.MAC.String() != admin || len(got.AltNames) > 0 || !got.Up ||
				got.Promis {
				t.Errorf("in the pod: %s", describe(got))
			}
			l.OK(a.check(keys...))
			must(t, l.changeAll("fast1")) // the VF is trusted
			l.Fails(a.check(keys...), plugin.CodeStateDiffers, "PF ")
			l.del(id, keys...)
			l.del(id, keys...)
		}
		a := l.add("plain")
		l.isDefault("net1", index)
		l.OK(a.check())
		if err := l.changeAll("net1"); err != nil && index == 1 {
			t.Logf("no own MAC: %v", err)
		}
		l.del("plain")
	}
}

// TestIGBTenant: without configured settings, the next pod gets the VF in its initial state although a tenant has changed all its
// properties.
func TestIGBTenant(t *testing.T) {
	l := newIGB(t)
	for index, vf := range []string{l.first(), l.second()} {
		l.allocate(vf)
		for _, id := range []string{"a", "b", "c"} {
			a := l.add(id)
			l.isDefault("net1", index)
			l.OK(a.check())
			must(t, l.changeAll("net1")) // the PF has set no MAC
			l.del(id)
		}
	}
}

// TestIGBMain: VFs are the pods' main interfaces, to which the egress limit from the runtime applies.
func TestIGBMain(t *testing.T) {
	l := newIGB(t, "prevResult", nil, "runtimeConfig", object{"bandwidth": object{"egressRate": 50_000_000}})
	l.allocate(l.nic.VFs[1].Device, l.nic.VFs[0].Device)
	a := l.add("a")
	if i := a.result.Interfaces; len(i) != 2 || i[0].Name != "eth0" || i[0].PciID != l.nic.VFs[0].Device || i[1].Name != "net1" ||
		i[1].PciID != l.nic.VFs[1].Device {
		t.Errorf("%s", a.prev)
	}
	if l.asPF(0).MaxRate != 50 || l.asPF(1).MaxRate != 50 {
		t.Errorf("%s", formatVF(l.asPF(0)))
	}
	l.OK(a.check())
	l.del("a")
}

// TestIGBRefused: the PF's driver refuses a setting, whose key is in the error of ADD, and ADD undoes its earlier changes.
func TestIGBRefused(t *testing.T) {
	l := newIGB(t, "vlan", 100, "mac", "02:00:00:00:aa:01", "trust", "on", "mtu", 1400)
	for _, vf := range []string{l.first(), l.second()} {
		l.allocate(vf)
		for _, c := range []struct {
			key   string
			value any
			code  uint
			says  string
		}{
			{"min_tx_rate", 10, plugin.CodeDevice, "min_tx_rate 10"},
			{"max_tx_rate", 1_000_000, plugin.CodeDevice, "max_tx_rate 1000000"},
			{"link_state", "enable", plugin.CodeKernelFeature, "state enable"},
			{"vlanProto", "802.1ad", plugin.CodeKernelFeature, "vlan 100 qos 0 proto 802.1ad"},
			{"mtu", 65535, plugin.CodeConfig, "mtu 65535"},
			{"driver", "nosuch", plugin.CodeDevice, "the driver is not loaded"},
		} {
			o := l.Call("ADD", "a", c.key, c.value)
			l.Fails(o, c.code, c.says)
			if !strings.Contains(o.Failure.Details, "pod=shop/web-0") || c.key != "mtu" && c.key != "driver" &&
				!strings.Contains(o.Failure.Details, "the PF's driver") {
				t.Errorf("%s: %q", c.key, o.Failure.Details)
			}
			l.isGolden() // before any DEL
			l.del("a")
		}
		l.add("b")
		l.del("b")
	}
	l.sriov.claims = filepath.Join(t.TempDir(), "claims")
	l.serveClaims(claimDevice(0, l.first(), vfconfig.Config{MaxTxRate: new(1_000_000)}))
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "VF "+l.first()+" with the settings of claim shop/web-0-a (maxTxRate 1000000): ")
	l.isGolden()
}

// TestIGBUserspace: a VF for a user space program is bound to vfio-pci, and its VFIO group can be opened. DEL restores the interface's
// name. A late DEL of a pod does not change the VF of the next one.
func TestIGBUserspace(t *testing.T) {
	l := newIGB(t, "driver", "vfio-pci", "mac", "02:00:00:00:aa:01", "vlan", 100)
	for index, vf := range []string{l.first(), l.second()} {
		l.allocate(vf)
		a := l.add("a")
		if i := a.result.Interfaces; len(i) != 2 || i[1].PciID != vf || i[1].Mac != "02:00:00:00:aa:01" || l.driverOf(vf) != "vfio-pci" {
			t.Errorf("%s, driver %s", a.prev, l.driverOf(vf))
		}
		if got := l.asPF(index); got.VLAN != 100 || got.MAC.String() != "02:00:00:00:aa:01" {
			t.Errorf("PF: %s", formatVF(got))
		}
		group, err := filepath.EvalSymlinks(filepath.Join(pci.Sysfs, "bus/pci/devices", vf, "iommu_group"))
		must(t, err)
		f, err := os.OpenFile("/dev/vfio/"+filepath.Base(group), os.O_RDWR, 0)
		must(t, err, f.Close())
		l.OK(a.check())
		b := l.otherPod()
		b.Fails(b.Call("ADD", "b"), plugin.CodeDevice, "pod shop/web-0 has it since ")
		l.del("a")

		c := l.otherPod()
		c.add("c")
		must(t, c.Pod.Close())
		b.add("b")
		l.OK(l.Call("DEL", "c", "CNI_NETNS", ""))
		if l.driverOf(vf) != "vfio-pci" {
			t.Errorf("a late DEL took it: %s", l.driverOf(vf))
		}
		b.del("b", "CNI_NETNS", "")
	}
}

// TestIGBUserspaceMAC: a program in user space finds the MAC that an admin has set on the PF, so the result of ADD has it. DEL leaves it to
// the interface, which the PF lets use no other.
func TestIGBUserspaceMAC(t *testing.T) {
	l := newIGB(t, "driver", "vfio-pci")
	l.allocate(l.first())
	before := l.asPF(0)
	want := before
	want.MAC = net.HardwareAddr{2, 0, 0, 0, 0xbb, 1}
	must(t, l.host.SetVF(l.pf(), 0, before, want))
	for range 2 { // the first DEL binds the network driver, which then has the MAC too
		if i := l.add("a").result.Interfaces; len(i) != 2 || i[1].Mac != want.MAC.String() {
			t.Errorf("%+v", i)
		}
		l.OK(l.Call("DEL", "a"))
		if got, link := l.asPF(0), l.link(l.nic.VFs[0].Name); !bytes.Equal(got.MAC, want.MAC) || !bytes.Equal(link.MAC, want.MAC) {
			t.Errorf("PF: %s, interface: %s", formatVF(got), describe(link))
		}
	}
}
