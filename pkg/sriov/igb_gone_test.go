// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

func writeSysfs(t *testing.T, file, text string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(pci.Sysfs, "bus/pci", file), []byte(text), 0o600))
}

// TestIGBGone removes VFs in every possible way while pods use them. CHECK reports it and DEL succeeds. The new VFs are free, without
// settings of earlier pods.
func TestIGBGone(t *testing.T) {
	l := newIGB(t)
	pf := kerneltest.RealPF(t)
	for _, way := range []struct {
		name string
		away func()
		back func()
	}{
		{"no VFs", func() { kerneltest.SetNumVFs(t, pf, 0) }, func() {}},
		{"PF without driver", func() { writeSysfs(t, "drivers/igb/unbind", pf) }, func() { writeSysfs(t, "drivers/igb/bind", pf) }},
		{"PF removed", func() { writeSysfs(t, "devices/"+pf+"/remove", "1") }, func() { writeSysfs(t, "rescan", "1") }},
	} {
		for _, again := range []bool{false, true} { // whether new VFs exist before DEL
			t.Run(way.name+map[bool]string{true: ", new ones by DEL"}[again], func(t *testing.T) {
				l.forSubtest(t).checkRemovedVFs(way.away, way.back, again)
			})
		}
	}
}

// checkRemovedVFs removes the VFs of a pod and runs CHECK and DEL. If `again`, it creates new VFs before DEL; they must have the
// kernel's default settings.
func (l igb) checkRemovedVFs(away, back func(), again bool) {
	l.Helper()
	first, second := l.nic.VFs[0].Device, l.nic.VFs[1].Device
	l.allocate(first, second)
	a := l.add("a", "vlan", 100, "trust", "on", "mtu", 1400)
	l.changeAll("net2")
	away()
	l.Fails(a.check("vlan", 100, "trust", "on", "mtu", 1400), plugin.CodeStateDiffers, "VF "+first+" of interface net1 does not exist")
	if again {
		back()
		l.recreateVFs()
	}
	l.OK(l.Call("DEL", "a"))
	if all, err := Holdings(); err != nil || len(all) > 0 {
		l.Errorf("journals are left: %+v, %v", all, err)
	}
	if !again {
		l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "VF "+first+" does not exist")
		back()
		l.recreateVFs()
	}
	for i, f := range l.nic.VFs { // with the kernel's default settings
		if got := l.asPF(i); got.VLAN != 0 || *got.Trust || !*got.SpoofCheck || l.link(f.Name).MTU != 1500 {
			l.Errorf("VF %d: %s", i, formatVF(got))
		}
	}
	l.golden = l.nodeLinks()
	b := l.add("b")
	l.isDefault("net1", 0)
	l.isDefault("net2", 1)
	l.OK(b.check())
	l.del("b")
}

// recreateVFs creates VFs while the PF is up.
func (l igb) recreateVFs() {
	l.Helper()
	must(l, l.host.SetUp(l.pf()))
	kerneltest.Await(l.T, "the PF has a carrier", func() bool { return l.pf().Runs })
	kerneltest.RealNIC(l.T, 2)
}

// TestIGBPodDies: when a namespace ends, the kernel moves its VF to the node, under its name from the pod or another. DEL finds it by
// its PCI address, even without a namespace from the runtime.
func TestIGBPodDies(t *testing.T) {
	l := newIGB(t)
	for _, netns := range []string{"named", ""} {
		for _, clash := range []bool{false, true} {
			pod := l.otherPod()
			l.allocate(l.nic.VFs[0].Device, l.nic.VFs[1].Device)
			pod.add("a", "vlan", 100, "trust", "on")
			pod.changeAll("net1")
			pod.inPod(func(ns *kernel.NS) { must(t, ns.SetPromisc(pod.podLink("net2"), true)) })
			if clash { // the kernel renames it to eth0, dev0, ...
				must(t, l.host.AddBridge("net2", nil, 0, false, false), l.host.AddBridge("mine", nil, 0, false, false))
			}
			must(t, pod.Pod.Close())
			keys := []any{}
			if netns == "" {
				keys = []any{"CNI_NETNS", ""}
			}
			l.OK(pod.Call("DEL", "a", keys...)) // at once: the kernel may not be done yet
			l.isGolden()
			if clash {
				must(t, l.host.DelLink("net2"), l.host.DelLink("mine"))
			}
		}
	}
	// The runtime passes no namespace although it exists.
	l.second()
	l.add("a", "vlan", 100)
	must(t, l.changeAll("net1"))
	l.del("a", "CNI_NETNS", "")
}

// TestIGBNamesTaken: an interface that has the VF's former name keeps it, and the VF gets a name from its PCI address.
func TestIGBNamesTaken(t *testing.T) {
	l := newIGB(t)
	l.second()
	l.add("a")
	name := l.nic.VFs[1].Name
	must(t, l.host.AddBridge(name, nil, 0, false, false), l.host.AddAltName(l.link(name), "other-second"))
	o := l.OK(l.Call("DEL", "a"))
	if !strings.Contains(o.Log, "another interface has the VF's former name") ||
		!strings.Contains(o.Log, "another interface has a former alternative name of the VF") {
		t.Errorf("log: %s", o.Log)
	}
	link, ok, err := l.host.LinkOf(l.nic.VFs[1].Device)
	if err != nil || !ok || link.Name != nameByAddress(address(t, l.nic.VFs[1].Device)) || strings.Join(link.AltNames, " ") != "alt-second" {
		t.Errorf("%s, %t, %v", describe(link), ok, err)
	}
	must(t, l.host.DelLink(name), l.host.SetDown(link), l.host.Rename(link, name), l.host.AddAltName(link, "other-second"), l.host.SetUp(link))
	l.isGolden()
}

// TestIGBHidden: DEL takes the VF from a pod that has hidden it in another namespace, even if another of its interfaces has the VF's
// former name.
func TestIGBHidden(t *testing.T) {
	l := newIGB(t)
	cellar := kerneltest.NewPod(t)
	netns, err := os.Open(cellar.Path)
	must(t, err)
	defer netns.Close()
	for _, id := range []string{"a", "b"} {
		l.second()
		l.add(id, "vlan", 100, "mac", "02:00:00:00:aa:01")
		l.inPod(func(pod *kernel.NS) {
			link, _, err := pod.Link("net1")
			must(t, err, pod.MoveLink(link, netns, "mine"))
		})
		if id == "b" {
			own, err := os.Open(l.Pod.Path)
			must(t, err)
			_, err = l.host.AddVeth(kernel.Veth{Host: "spy", Pod: "net1", PodMAC: net.HardwareAddr{2, 0, 0, 0, 0xaa, 1}, Netns: own})
			must(t, err, own.Close())
		}
		o := l.OK(l.Call("DEL", id))
		if id == "b" {
			l.podLink("net1") // the pod's own interface
			must(t, l.host.DelLink("spy"))
		}
		if !strings.Contains(o.Log, "rebinding its driver") {
			t.Errorf("log: %s", o.Log)
		}
		l.isGolden()
	}
}

// TestIGBOnePod: of two pods that ask for the same VF, one gets it. A late DEL of an earlier pod does not take it from the new one.
func TestIGBOnePod(t *testing.T) {
	l := newIGB(t, "vlan", 100)
	vf := l.second()
	old := l.otherPod()
	a := old.add("a")
	l.Fails(l.Call("ADD", "b"), plugin.CodeDevice, "VF "+vf+": pod shop/web-0 has it since 20")
	old.OK(a.check())
	must(t, old.changeAll("net1"), old.Pod.Close())
	b := l.add("b")
	l.OK(old.Call("DEL", "a"))
	l.OK(old.Call("DEL", "a", "CNI_NETNS", ""))
	l.OK(b.check())
	l.del("b")
	old = l.otherPod()
	old.add("c")
	home, err := l.host.File()
	must(t, err)
	defer home.Close()
	old.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link("net1")
		must(t, err, pod.MoveLink(link, home, "left"))
	})
	b = l.add("d")
	l.OK(old.Call("DEL", "c"))
	l.OK(b.check())
	l.del("d")
}
