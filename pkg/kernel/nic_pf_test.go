// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func trialsWithPF() []trial {
	return []trial{{"settings", vfSettings}, {"refused", vfRefused}, {"joined errors", vfJoined}, {"device", vfDevice},
		{"namespace gone", vfReturns},
		{"VF to PF", vfToPF}, {"VLAN", vfVLAN}, {"MAC", vfMAC}, {"rates, link state and 802.1ad", vfUntested}}
}

// testedPF returns the PF and its settings for VF 0, and restores them when the test ends.
func (c card) testedPF(t *testing.T) (Link, VF) {
	t.Helper()
	pf := mustLink(t, c.host, c.PF)
	before := mustVF(t, c.host, pf, 0)
	t.Cleanup(func() { kerneltest.Must(t, c.host.SetVF(pf, 0, mustVF(t, c.host, pf, 0), before)) })
	return pf, before
}

func mustVF(t *testing.T, n *Node, pf Link, index int) VF {
	t.Helper()
	vf, ok, err := n.VF(pf, index)
	if err != nil || !ok {
		t.Fatalf("VF %d of %s: %t, %v", index, pf.Name, ok, err)
	}
	return vf
}

// vfSettings: SetVF changes each setting of a VF alone, and leaves the other VF. One more call restores all settings.
func vfSettings(t *testing.T, c card) {
	pf, before := c.testedPF(t)
	other := mustVF(t, c.host, pf, 1)
	now, on, off := before, true, false
	for i, set := range []func(*VF){
		func(v *VF) { v.MAC = mac("02:00:00:00:00:10") }, func(v *VF) { v.VLAN = 100 }, func(v *VF) { v.QoS = 3 },
		func(v *VF) { v.SpoofCheck = &off }, func(v *VF) { v.Trust = &on }, func(v *VF) { v.MaxRate = 100 },
	} {
		want := now
		set(&want)
		if cmp.Equal(now, want) {
			t.Errorf("%d: it is so already", i)
		}
		kerneltest.Must(t, c.host.SetVF(pf, 0, now, want))
		now = mustVF(t, c.host, pf, 0)
		if diff := cmp.Diff(want, now); diff != "" {
			t.Errorf("%d: %s", i, diff)
		}
	}
	kerneltest.Must(t, c.host.SetVF(pf, 0, now, before))
	if diff := cmp.Diff([]VF{before, other}, []VF{mustVF(t, c.host, pf, 0), mustVF(t, c.host, pf, 1)}); diff != "" {
		t.Error(diff)
	}
	if _, ok, err := c.host.VF(pf, 2); ok || err != nil {
		t.Errorf("VF 2: %t, %v", ok, err)
	}
	if err := c.host.SetVF(pf, 99, before, VF{VLAN: 1}); err == nil || errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("VF 99: %v", err)
	}
	if stats, err := VFStatsOf(c.PF); err != nil || len(stats) != 2 {
		t.Errorf("%v, %v", stats, err)
	}
}

// vfRefused: the error of SetVF contains the setting that the driver refused.
func vfRefused(t *testing.T, c card) {
	pf, before := c.testedPF(t)
	for _, s := range []struct {
		words string
		errno error
		set   func(*VF)
	}{
		{"vlan 100 qos 0 proto 802.1ad", unix.EPROTONOSUPPORT, func(v *VF) { v.VLAN, v.Proto = 100, "802.1ad" }},
		{"min_tx_rate 10 max_tx_rate 0", unix.EINVAL, func(v *VF) { v.MinRate = 10 }},
		{"min_tx_rate 0 max_tx_rate 1000000", unix.EINVAL, func(v *VF) { v.MaxRate = 1000000 }},
		{"state enable", unix.EOPNOTSUPP, func(v *VF) { v.LinkState = "enable" }},
		{"vlan 4096 qos 0 proto 802.1q", unix.EINVAL, func(v *VF) { v.VLAN = 4096 }},
	} {
		want := before
		s.set(&want)
		err := c.host.SetVF(pf, 0, before, want)
		if text := "link set " + c.PF + " vf 0 " + s.words + ": " + s.errno.Error(); !errors.Is(err, s.errno) || err.Error() != text {
			t.Errorf("%v, want %s", err, text)
		}
	}
	if diff := cmp.Diff(before, mustVF(t, c.host, pf, 0)); diff != "" {
		t.Error(diff)
	}
}

// vfUntested skips the settings that no available driver supports.
func vfUntested(t *testing.T, _ card) {
	t.Skip("igb refuses minimum rates, link states and 802.1ad, and Debian's kernels have no netdevsim, which takes them")
}

// vfJoined: SetVF applies the other settings if the driver refuses some, and does not send the refused ones when it restores the settings.
func vfJoined(t *testing.T, c card) {
	pf, before := c.testedPF(t)
	want, on := before, true
	want.VLAN, want.Trust, want.LinkState, want.MinRate = 7, &on, "disable", 10
	err := c.host.SetVF(pf, 0, before, want)
	if err == nil || strings.Count(err.Error(), "\n") != 1 || !strings.Contains(err.Error(), "min_tx_rate 10") ||
		!strings.Contains(err.Error(), "state disable") {
		t.Error(err)
	}
	now := mustVF(t, c.host, pf, 0)
	if want.LinkState, want.MinRate = before.LinkState, 0; !cmp.Equal(want, now) {
		t.Error(cmp.Diff(want, now))
	}
	kerneltest.Must(t, c.host.SetVF(pf, 0, now, before))
}

// vfDevice: a VF's link has the VF's PCI address as its Device, by which LinkOf finds it.
func vfDevice(t *testing.T, c card) {
	pod := newInside(t)
	for _, f := range c.VFs {
		vf := mustLink(t, c.host, f.Name)
		if found, ok, err := c.host.LinkOf(f.Device); err != nil || !ok || found.Name != f.Name || vf.Device != f.Device {
			t.Errorf("%+v, %t, %v", found, ok, err)
		}
	}
	kerneltest.Must(t, c.host.MoveLink(mustLink(t, c.host, c.VFs[1].Name), pod.netns, "net1"))
	if found, ok, err := pod.LinkOf(c.VFs[1].Device); err != nil || !ok || found.Name != "net1" {
		t.Errorf("%+v, %t, %v", found, ok, err)
	}
	if pf := mustLink(t, c.host, c.PF); pf.PermMAC == nil || pf.PermMAC.String() != pf.MAC.String() {
		t.Errorf("%+v", pf)
	}
}

// vfReturns: when a namespace is deleted, its VF returns to the host with the name that it had there, and the PF keeps its settings.
func vfReturns(t *testing.T, c card) {
	pod := newInside(t)
	pf, before := c.testedPF(t)
	want := before
	want.VLAN = 100
	vf := mustLink(t, c.host, c.VFs[0].Name)
	kerneltest.Must(t, c.host.SetVF(pf, 0, before, want), c.host.AddAltName(vf, "kt-slot-1"), c.host.MoveLink(vf, pod.netns, "net1"))
	vf = mustLink(t, pod, "net1")
	kerneltest.Must(t, pod.SetUp(vf), pod.SetMTU(vf, 1300), pod.SetPromisc(vf, true))
	if diff := cmp.Diff(want, mustVF(t, c.host, pf, 0)); diff != "" { // the PF reports a VF in another namespace too
		t.Error(diff)
	}
	pod.end()
	kerneltest.Await(t, "the VF is back", func() bool {
		link, ok, err := c.host.LinkOf(c.VFs[0].Device)
		kerneltest.Must(t, err)
		vf = link
		return ok
	})
	if vf.Name != "net1" || vf.Up || vf.MTU != 1300 || !vf.Promis || len(vf.AltNames) != 1 {
		t.Errorf("%+v", vf)
	}
	if diff := cmp.Diff(want, mustVF(t, c.host, pf, 0)); diff != "" {
		t.Error(diff)
	}
	kerneltest.Must(t, c.host.Rename(vf, c.VFs[0].Name), c.host.DelAltName(vf, "kt-slot-1"), c.host.SetMTU(vf, 1500),
		c.host.SetPromisc(vf, false))
}

// vfVLAN: two VFs in the same VLAN reach each other, but not a VF without a VLAN.
func vfVLAN(t *testing.T, c card) {
	pf, before := c.testedPF(t)
	tagged := before
	tagged.VLAN = 100
	a, b := c.giveVF(t, 0, "10.9.0.1"), c.giveVF(t, 1, "10.9.0.2")
	if !a.canReach(t, b, 20*time.Second) {
		t.Fatal("they do not reach one another to begin with")
	}
	kerneltest.Must(t, c.host.SetVF(pf, 0, before, tagged))
	if a.canReach(t, b, time.Second) || b.canReach(t, a, time.Second) {
		t.Error("they reach one another from VLAN to VLAN")
	}
	other := mustVF(t, c.host, pf, 1)
	tagged = other
	tagged.VLAN = 100
	kerneltest.Must(t, c.host.SetVF(pf, 1, other, tagged))
	if !a.canReach(t, b, 20*time.Second) {
		t.Error("they do not reach one another in one VLAN")
	}
	kerneltest.Must(t, c.host.SetVF(pf, 1, tagged, other))
}

// vfMAC: a MAC that the PF sets takes effect when the VF's driver is bound again. The pod cannot change it until the PF resets it.
func vfMAC(t *testing.T, c card) {
	pf, before := c.testedPF(t)
	admin, device := before, c.VFs[0].Device
	admin.MAC = mac("02:00:00:00:00:10")
	first := mustLink(t, c.host, c.VFs[0].Name)
	kerneltest.Must(t, c.host.SetVF(pf, 0, before, admin))
	if got := mustLink(t, c.host, first.Name); got.MAC.String() != first.MAC.String() {
		t.Errorf("it came at once: %+v", got)
	}
	kerneltest.Rebind(t, device)
	vf := mustLink(t, c.host, kerneltest.Interface(t, device))
	if vf.MAC.String() != admin.MAC.String() {
		t.Errorf("after another bind: %+v", vf)
	}
	const words = " address 02:00:00:00:00:11: cannot assign requested address"
	if err := c.host.SetMAC(vf, mac("02:00:00:00:00:11")); !errors.Is(err, unix.EADDRNOTAVAIL) || err.Error() != "link set "+vf.Name+words {
		t.Error(err)
	}
	// A zero MAC makes the PF reset that of the VF. Restoring the previous one would set a MAC that the pod cannot change.
	none := before
	none.MAC = make(net.HardwareAddr, 6)
	kerneltest.Must(t, c.host.SetVF(pf, 0, admin, none), c.host.SetMAC(vf, mac("02:00:00:00:00:11")))
	if got := mustVF(t, c.host, pf, 0); got.MAC.String() != "02:00:00:00:00:11" {
		t.Errorf("after the VF's own change: %+v", got)
	}
}

// vfToPF: a pod with a VF and the host with the PF reach each other.
func vfToPF(t *testing.T, c card) {
	pf := mustLink(t, c.host, c.PF)
	address := netip.MustParsePrefix("10.9.0.9/24")
	kerneltest.Must(t, c.host.AddAddress(pf, address, false))
	t.Cleanup(func() { kerneltest.Must(t, c.host.DelAddress(pf, address)) })
	a, b := c.giveVF(t, 0, "10.9.0.1"), end{func(f func() error) error { return f() }, address.Addr()}
	if !a.canReach(t, b, 20*time.Second) || !b.canReach(t, a, 20*time.Second) {
		t.Error("they do not reach one another")
	}
}
