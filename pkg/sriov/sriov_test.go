// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// changeAsTenant makes every change to a pod's interface that a tenant can make.
func (l testLab) changeAsTenant(name string) {
	l.Helper()
	must(l, l.Pod.Do(func() error { return pci.SetFeatures(name, nil) }))
	l.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link(name)
		traits := link.Traits
		traits.NoARP, traits.NoMulticast, traits.Mode, traits.Group, traits.GSOMaxSize, traits.GSOMaxSegs = true, true, 1, 7, 2000, 1
		must(l, err, pod.SetTraits(link, traits), pod.SetTxQueue(link, 77), pod.SetPromisc(link, true), pod.SetAllMulti(link, !link.AllMulti),
			pod.SetMTU(link, 1280),
			pod.SetAlias(link, "tenant's"), pod.AddAltName(link, "tenant"), pod.AddAltName(link, "ens0f0"))
	})
}

// TestRoundTrip: after any changes by a pod, the next one gets the VF with the settings of the admin.
func TestRoundTrip(t *testing.T) {
	l := newLab(t)
	l.allocate(vf1)
	before := l.link("ens0f0v1")
	for _, id := range []string{"a", "b"} {
		a := l.add(id, "mtu", 1300, "mac", "02:00:00:00:00:07")
		got := l.podLink("net1")
		if got.MTU != 1300 || got.MAC.String() != "02:00:00:00:00:07" || len(got.AltNames) > 0 || !got.Up || got.Promis {
			t.Errorf("in the pod: %s; on the node it was %s", describe(got), describe(before))
		}
		want := []*types100.Interface{{Name: "eth0", Sandbox: l.Pod.Path},
			{Name: "net1", Mac: "02:00:00:00:00:07", Mtu: 1300, Sandbox: l.Pod.Path, PciID: vf1}}
		if diff := cmp.Diff(want, a.result.Interfaces); diff != "" || len(a.result.IPs) != 1 {
			t.Errorf("%v\n%s", a.result.IPs, diff)
		}
		l.OK(a.check())
		l.changeAsTenant("net1")
		l.del(id)
		l.del(id) // a second DEL succeeds
	}
}

// TestOrder: interfaces are numbered by container, then by resource in the order of the configuration, then by address.
func TestOrder(t *testing.T) {
	l := newLab(t, "ifName", "vf{index}x")
	for i, d := range []struct {
		container    int
		resource, id string
	}{{1, fast, vf0}, {0, slow, vf1}, {0, fast, "0000:11:02.3"}, {0, fast, vf2}} {
		*l.devices = append(*l.devices, poddevices.Device{Namespace: "shop", Pod: "web-0", Container: fmt.Sprint("c", i), Index: d.container,
			Resource: d.resource, ID: d.id})
	}
	a := l.add("a")
	var got []string
	for _, i := range a.result.Interfaces[1:] {
		got = append(got, i.Name+"="+i.PciID)
		l.podLink(i.Name)
	}
	if diff := cmp.Diff([]string{"vf1x=" + vf2, "vf2x=0000:11:02.3", "vf3x=" + vf1, "vf4x=" + vf0}, got); diff != "" {
		t.Error(diff)
	}
	l.OK(a.check())
	l.del("a")
}

// TestMainPlugin: if sriov is the main plugin, the first VF gets CNI_IFNAME.
func TestMainPlugin(t *testing.T) {
	l := newLab(t, "prevResult", nil)
	l.allocate(vf1, vf0)
	a := l.add("a")
	if i := a.result.Interfaces; len(i) != 2 || i[0].Name != "eth0" || i[0].PciID != vf0 || i[1].Name != "net1" || i[1].PciID != vf1 {
		t.Errorf("%s", a.prev)
	}
	l.OK(a.check())
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "interface eth0 already exists in the pod")
	l.OK(a.check()) // the first attachment is intact
	l.del("a")
	l.allocate()
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "the pod has no device of example.com/fast, example.com/slow")
	l.Fails(l.Call("ADD", "a", "CNI_ARGS", ""), plugin.CodeEnvironment, "K8S_POD_NAME")
	l.Fails(l.Call("ADD", "a", "runtimeConfig", object{"bandwidth": object{"ingressRate": 1}}), plugin.CodeConfig,
		"ingressRate 1: a VF cannot limit what the pod receives")
	l.isGolden()
}

// TestMultus: the VF whose PCI address the caller passes becomes the pod's interface, and neither the device plugin nor the kubelet is
// asked.
func TestMultus(t *testing.T) {
	l := newLab(t, "prevResult", nil, "resources", nil)
	l.sriov.socket = "/nonexistent"
	for _, keys := range [][]any{{"deviceID", vf2}, {"pciBusID", vf2}, {"deviceID", vf2, "pciBusID", vf2},
		{"runtimeConfig", object{"deviceID": vf2}}} {
		keys = append(keys, "CNI_IFNAME", "net7", "CNI_ARGS", "")
		a := l.add("a", keys...)
		if i := a.result.Interfaces; len(i) != 1 || i[0].Name != "net7" || i[0].PciID != vf2 {
			t.Errorf("%s", a.prev)
		}
		l.OK(a.check(keys...))
		l.del("a", keys...)
	}
	l.Fails(l.Call("ADD", "a", "deviceID", vf2, "pciBusID", vf1), plugin.CodeConfig, "contradicts another key")
	l.Fails(l.Call("ADD", "a", "deviceID", "11:02.2"), plugin.CodeConfig, `deviceID "11:02.2"`)
	l.Fails(l.Call("ADD", "a"), plugin.CodeConfig, "resources: want")
}

// TestWithoutVF: for a pod without VFs, ADD returns the result of the earlier plugins and writes no file.
func TestWithoutVF(t *testing.T) {
	l := newLab(t)
	*l.devices = []poddevices.Device{}
	for _, keys := range [][]any{nil, {"CNI_ARGS", ""}} {
		a := l.add("a", keys...)
		if len(a.result.Interfaces) != 1 || len(a.result.IPs) != 1 {
			t.Errorf("%s", a.prev)
		}
		l.OK(a.check(keys...))
		l.OK(l.Call("DEL", "a", keys...))
	}
	if found, err := os.ReadDir(store.Root); len(found) > 0 {
		t.Errorf("written: %v, %v", found, err)
	}
}

// TestFailClosed: ADD fails if the VFs of the pod are unknown.
func TestFailClosed(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	good := (*l.devices)[0]
	for says, change := range map[string]func(d *poddevices.Device){
		"answers with a device of example.com/fast of pod shop/db-0":  func(d *poddevices.Device) { d.Pod = "db-0" },
		"answers with a device of example.com/fast of pod bank/web-0": func(d *poddevices.Device) { d.Namespace = "bank" },
		"answers with a device of example.com/other of pod":           func(d *poddevices.Device) { d.Resource = "example.com/other" },
	} {
		d := good
		change(&d)
		*l.devices = []poddevices.Device{good, d}
		l.Fails(l.Call("ADD", "a"), plugin.CodeTryAgain, says)
	}
	d := good
	d.ID = "ens0f0v0"
	*l.devices = []poddevices.Device{d}
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, `the pod's device "ens0f0v0" is not a VF`)
	*l.devices = []poddevices.Device{good, good}
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "was allocated to the pod twice")
	l.allocate(vf0, vf1)
	l.Fails(l.Call("ADD", "a", "mac", "02:00:00:00:00:01"), plugin.CodeConfig, "only one VF can have it, but the pod has 2 VFs")
	l.sriov.socket = "/nonexistent"
	o := l.Call("ADD", "a")
	l.Fails(o, plugin.CodeTryAgain, "find the VFs of the pod: ask the kubelet at /run/no-kubelet/pod-resources/kubelet.sock")
	if !strings.Contains(o.Failure.Details, "pod=shop/web-0") || !strings.Contains(o.Failure.Details, "check that the kubelet is running") {
		t.Errorf("%q", o.Failure.Details)
	}
	l.isGolden()
}

// TestNotToBeGiven: ADD refuses a PF and interfaces that are in use. They stay on the node.
func TestNotToBeGiven(t *testing.T) {
	l := newLab(t)
	l.allocate("0000:11:00.0")
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "PCI function 0000:11:00.0 is not a VF of this node")
	l.allocate("0000:12:00.0")
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "VF 0000:12:00.0 does not exist")
	must(t, l.host.AddBridge("br0", nil, 0, false, false))
	bridge := l.link("br0")
	must(t, l.host.SetMaster(l.link("ens0f0v0"), bridge))
	l.allocate(vf1, vf0) // the earlier VF returns
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "is in use on the node: ens0f0v0 is a port of another interface")
	must(t, l.host.DelLink("br0"))
	l.isGolden()
}

// TestRefusedCards: ADD refuses InfiniBand VFs and VFs of a PF in switchdev mode, and says what to do. They stay on the node.
func TestRefusedCards(t *testing.T) {
	const pf = "0000:11:00.0"
	for name, test := range map[string]struct{ says, hint string }{
		"InfiniBand": {"PCI function " + vf0 + " is refused: setting the GUID and the partition keys of an InfiniBand VF is not supported",
			"attach such VFs with ib-sriov under Multus"},
		"switchdev": {"PCI function " + vf0 + " is refused: PF " + pf + " is in switchdev mode, in which the packets of its VFs end at representors",
			"run 'devlink dev eswitch set pci/" + pf + " mode legacy', or attach the VFs with ovs-cni under Multus"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.allocate(vf0)
			if name == "switchdev" {
				pcitest.Set(t, l.sriov.sysfs, pf, "net/ens0f0_0/phys_port_name", "pf0vf0")
			} else {
				pcitest.Set(t, l.sriov.sysfs, vf0, "net/ens0f0v0/type", "32")
			}
			o := l.Call("ADD", "a")
			l.Fails(o, plugin.CodeDevice, test.says)
			if n := strings.Count(o.Failure.Details, test.hint); n != 1 {
				t.Errorf("the hint is there %d times: %s", n, o.Failure.Details)
			}
			l.isGolden()
		})
	}
}

// TestPFUntold: without access to the PF, ADD refuses a setting that only the PF can set, and names its key.
func TestPFUntold(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	for key, value := range map[string]any{"vlan": 100, "spoofchk": "off", "trust": "on", "link_state": "enable", "min_tx_rate": 1,
		"max_tx_rate": 100} {
		l.Fails(l.Call("ADD", "a", key, value), plugin.CodeKernelFeature, "cannot set "+key+": the PF of VF 0000:11:02.0 is not available")
	}
	l.add("a", "vlan", 0, "max_tx_rate", 0)
	l.del("a")
}

// TestTaken: ADD fails before any change if the pod already has an interface with a planned name.
func TestTaken(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0, vf1)
	l.inPod(func(pod *kernel.NS) {
		lo, _, err := pod.Link("lo")
		must(t, err, pod.AddAltName(lo, "net2"))
	})
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "interface net2 already exists in the pod")
	l.isGolden()
	if found, err := filepath.Glob(store.Root + "/*/[^.]*"); len(found) > 0 {
		t.Errorf("written: %v, %v", found, err)
	}
	l.inPod(func(pod *kernel.NS) {
		lo, _, err := pod.Link("lo")
		must(t, err, pod.DelAltName(lo, "net2"))
	})
}

func ranges() object {
	return object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.61.0.0/24"}}, []any{object{"subnet": "fd00:61::/64"}}},
		"routes": []any{object{"dst": "192.0.2.0/24", "gw": "10.61.0.1"}}}
}

// TestAddresses: each VF gets its own addresses after duplicate address detection, which reportIPs adds to the result of ADD. DEL
// releases them.
func TestAddresses(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t, "ipam", ranges())
	l.allocate(vf0, vf1)
	quiet := l.add("quiet")
	if len(quiet.result.IPs) != 1 || len(quiet.result.Routes) != 0 {
		t.Errorf("reported: %s", quiet.prev)
	}
	l.OK(quiet.check())
	leases, _ := filepath.Glob("/var/lib/cni/networks/net.vf/*:*")
	if own, _ := filepath.Glob("/var/lib/cni/networks/net/*"); len(leases) != 2 || len(own) != 0 {
		t.Errorf("leases %v and %v", leases, own)
	}
	l.del("quiet")
	a := l.add("a", "reportIPs", true)
	var got []string
	for _, ip := range a.result.IPs[1:] {
		got = append(got, fmt.Sprint(ip.Address.String(), " on ", a.result.Interfaces[*ip.Interface].Name))
	}
	if diff := cmp.Diff([]string{"10.61.0.4/24 on net1", "fd00:61::4/64 on net1", "10.61.0.5/24 on net2", "fd00:61::5/64 on net2"},
		got); diff != "" {
		t.Error(diff)
	}
	l.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link("net1")
		must(t, err)
		has, err := pod.Addresses(link)
		if text := fmt.Sprint(has); err != nil || text != "[10.61.0.4/24 fd00:61::4/64]" {
			t.Errorf("%s, %v", text, err)
		}
	})
	l.OK(a.check("reportIPs", true))
	l.del("a")
	if leases, _ := filepath.Glob("/var/lib/cni/networks/net.vf/*[:.]*[0-9]"); len(leases) != 2 { // last_reserved_ip of two ranges
		t.Errorf("leases %v", leases)
	}
}
