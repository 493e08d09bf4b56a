// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// claimDevice returns a device of the first claim. The settings in `claimed` come from the claim, all others from the class.
func claimDevice(result int, address string, c vfconfig.Config, claimed ...string) poddevices.Device {
	d := claimed1(result, address)
	c.Claimed, d.Config = claimed, &c
	return d
}

func claimed1(result int, address string) poddevices.Device {
	return claimedDevice("c-0", "a", result, address)
}

// TestClaimSettings: each VF gets the settings of its class and claim, and those of the conflist where they set nothing. A VF without a
// claim gets only the conflist's.
func TestClaimSettings(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t, "ipam", ranges(), "mtu", 1300)
	l.serveClaims(
		claimDevice(0, vf1, vfconfig.Config{MAC: "02:00:00:00:00:01", IfName: "data", IPs: []string{"10.61.0.77", "fd00:61::77/64"}},
			"mac", "ifName", "ips"),
		claimDevice(1, vf2, vfconfig.Config{MTU: new(1350), IfName: "vf{index}"}),
		claimed1(2, "0000:11:02.3"),
	)
	l.allocate0(vf0)
	a := l.add("a", "reportIPs", true)
	var got []string
	for _, i := range a.result.Interfaces[1:] {
		got = append(got, fmt.Sprint(i.Name, " ", i.PciID, " ", l.podLink(i.Name).MTU))
	}
	for _, ip := range a.result.IPs[1:] {
		if name := a.result.Interfaces[*ip.Interface].Name; name == "data" {
			got = append(got, ip.Address.String())
		}
	}
	want := []string{"net1 0000:11:02.0 1300", "data 0000:11:02.1 1300", "vf3 0000:11:02.2 1350", "net4 0000:11:02.3 1300", "10.61.0.77/24",
		"fd00:61::77/64"}
	if diff := cmp.Diff(want, got); diff != "" || l.podLink("data").MAC.String() != "02:00:00:00:00:01" {
		t.Errorf("MAC %s\n%s", l.podLink("data").MAC, diff)
	}
	l.OK(a.check())
	l.del("a")
}

// serveClaims makes the device plugin return devices of claims, and writes the claims' records.
func (l testLab) serveClaims(devices ...poddevices.Device) {
	l.Helper()
	*l.devices = devices
	l.prepareClaims(l.TempDir(), "u-0", devices...)
}

// allocate0 allocates a further VF, without a claim, to the pod.
func (l testLab) allocate0(address string) {
	*l.devices = append(*l.devices, poddevices.Device{Namespace: "shop", Pod: "web-0", Container: "app", Resource: fast, ID: address})
}

// TestClaimSettingsRefused: ADD fails before any change if settings in the claim record cannot be applied.
func TestClaimSettingsRefused(t *testing.T) {
	l := newLab(t)
	const sets = "VF " + vf0 + " with the settings of claim shop/web-0-a: "
	socket := l.sriov.socket
	for _, c := range []struct {
		config vfconfig.Config
		says   string
		keys   []any
	}{
		{vfconfig.Config{VLAN: new(4095)}, sets + "vlan 4095: want 0-4094, 0 for none", nil},
		{vfconfig.Config{Unknown: []string{"queues"}}, sets + `"queues": this version does not know the key`, nil},
		{vfconfig.Config{VLANQoS: new(3)}, sets + "vlanQoS and vlanProto need a vlan that is not 0", nil},
		{vfconfig.Config{VLAN: new(0)}, sets + "vlanQoS and vlanProto need a vlan that is not 0", []any{"vlan", 5, "vlanQoS", 3}},
		{vfconfig.Config{MinTxRate: new(100)}, sets + "minTxRate 100: more than maxTxRate 50", []any{"max_tx_rate", 50}},
		{vfconfig.Config{IPs: []string{"10.61.0.77"}}, sets + "the configuration has no ipam, so VFs get no addresses", nil},
		{vfconfig.Config{IPs: []string{"10.61.0"}}, sets + `ips "10.61.0": want an address`, []any{"ipam", ranges()}},
		{vfconfig.Config{IfName: "eth0"}, sets + `ifName "eth0": every pod already has an interface of this name`, nil},
		{vfconfig.Config{IfName: "data"}, sets + "ifName data: the runtime requires the name eth0", []any{"prevResult", nil}},
	} {
		l.serveClaims(claimDevice(0, vf0, c.config))
		if len(c.config.Unknown) > 0 { // only another version could write it
			l.sriov.socket = "/nonexistent"
			dir := l.lateRecord(vf0, `"queues":4`)
			c.keys = []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-0"}
		}
		l.Fails(l.Call("ADD", "a", c.keys...), plugin.CodeConfig, c.says)
		l.sriov.socket = socket
	}
	const both = ": VF " + vf0 + " of claim shop/web-0-a and VF " + vf1 + " of claim shop/web-0-b"
	for _, c := range []struct {
		config vfconfig.Config
		says   string
	}{
		{vfconfig.Config{IfName: "a"}, "two interfaces of the pod would be named a"},
		{vfconfig.Config{MAC: "02:00:00:00:00:01"}, "mac 02:00:00:00:00:01: two VFs of the pod would have the same MAC"},
	} {
		other := claimDevice(0, vf1, c.config)
		other.Claim.UID, other.Claim.Name, other.Claim.PodClaim = "c-1", "web-0-b", "b"
		l.serveClaims(claimDevice(0, vf0, c.config), other)
		l.Fails(l.Call("ADD", "a"), plugin.CodeConfig, c.says+both)
	}
	// The lab's PF has no interface, so settings on the PF fail.
	for _, c := range []struct {
		config vfconfig.Config
		says   string
		keys   []any
	}{
		{vfconfig.Config{VLAN: new(100), Claimed: []string{"vlan"}}, "vlan 100 of claim shop/web-0-a", nil},
		{vfconfig.Config{MaxTxRate: new(1000)}, "maxTxRate 1000 of the class of claim shop/web-0-a", nil},
		{vfconfig.Config{MTU: new(1300)}, "max_tx_rate", []any{"max_tx_rate", 10}},
	} {
		l.serveClaims(claimDevice(0, vf0, c.config, c.config.Claimed...))
		l.Fails(l.Call("ADD", "a", c.keys...), plugin.CodeKernelFeature, "cannot set "+c.says+": the PF of VF "+vf0+" is not available")
	}
	l.isGolden()
}

// lateRecord writes a claim record with one setting for a VF, and returns the kubelet's folder.
func (l testLab) lateRecord(address, key string) string {
	l.Helper()
	dir := (&fakeKubelet{containers: []*api.ContainerResources{container("app")}}).serveSocket(l.T)
	writeCheckpoint(l.T, dir, checkpointOf())
	l.prepareClaims(dir, "u-0", claimDevice(0, address, vfconfig.Config{MTU: new(1300)}))
	path := filepath.Join(l.sriov.claims, "c-0")
	data, err := os.ReadFile(path)
	must(l, err, os.WriteFile(path, []byte(strings.Replace(string(data), `"mtu":1300`, key, 1)), 0o600))
	return dir
}

// TestClaimAndAnnotation: a pod's annotation overrides the class, but ADD fails if it contradicts the claim.
func TestClaimAndAnnotation(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t, append(allowAll, "ipam", ranges())...)
	config := vfconfig.Config{MAC: "02:00:00:00:00:01", IfName: "data", IPs: []string{"10.61.0.77"}}
	for _, c := range []struct{ text, says string }{
		{`{"data": {"mac": "02:00:00:00:00:02"}}`,
			`annotation podlace.io/vfs: data: mac 02:00:00:00:00:02: claim shop/web-0-a sets mac "02:00:00:00:00:01"`},
		{`{"data": {"name": "x"}}`, `annotation podlace.io/vfs: data: name x: claim shop/web-0-a sets ifName "data"`},
		{`{"data": {"ips": ["10.61.0.78"]}}`,
			`annotation podlace.io/vfs: data: ips ["10.61.0.78"]: claim shop/web-0-a sets ips ["10.61.0.77"]`},
		{`{"data": {"ips": []}}`, `annotation podlace.io/vfs: data: ips []: claim shop/web-0-a sets ips ["10.61.0.77"]`},
		{`{"net1": {"name": "x"}}`, `the pod has no VF with the name "net1"`},
	} {
		l.serveClaims(claimDevice(0, vf0, config, "mac", "ifName", "ips"))
		l.Fails(l.Call("ADD", "a", "runtimeConfig", withAnnotation(c.text)), plugin.CodeConfig, c.says)
	}
	l.isGolden()
	l.add("a", "runtimeConfig", withAnnotation(`{"data": {"mac": "02:00:00:00:00:01", "ips": ["10.61.0.77"], "name": "data"}}`))
	l.del("a")
	l.serveClaims(claimDevice(0, vf0, config))
	a := l.add("a", "reportIPs", true, "runtimeConfig", withAnnotation(`{"data": {"mac": "02:00:00:00:00:02", "name": "x"}}`))
	if got := l.podLink("x").MAC.String(); got != "02:00:00:00:00:02" || len(a.result.IPs) < 2 ||
		a.result.IPs[1].Address.IP.String() != "10.61.0.77" {
		t.Errorf("MAC %s, %v", got, a.result.IPs)
	}
	l.del("a")
}

// TestClaimOfNamedVF: if the caller passes the VF's address, as Multus does, the settings of its claim apply. The VF of another pod's
// claim is refused.
func TestClaimOfNamedVF(t *testing.T) {
	l := newLab(t)
	dir := (&fakeKubelet{containers: []*api.ContainerResources{container("app")}}).serveSocket(t)
	l.prepareClaims(dir, "u-0", claimDevice(0, vf0, vfconfig.Config{MTU: new(1350)}))
	keys := func(uid string) []any {
		return []any{"kubeletDir", dir, "deviceID", vf0, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=" + uid,
			"prevResult", nil}
	}
	l.Fails(l.Call("ADD", "b", keys("u-1")...), plugin.CodeDevice, "VF "+vf0+" belongs to claim shop/web-0-a, which is not a claim of this pod")
	l.Fails(l.Call("ADD", "b", "deviceID", vf0), plugin.CodeTryAgain, "whether the pod has VF "+vf0+" of claim shop/web-0-a: ")
	l.isGolden()
	l.add("a", keys("u-0")...)
	if got := l.podLink("eth0").MTU; got != 1350 {
		t.Errorf("mtu %d", got)
	}
	l.del("a", keys("u-0")...)
	l.add("a", append(keys("u-1"), "deviceID", vf1)...) // no claim has this VF
	l.del("a", keys("u-1")...)
}

// TestMergedSettings: on the PF, a claim's setting overrides the configuration, and the pod's egress limit a higher max_tx_rate.
func TestMergedSettings(t *testing.T) {
	cfg, err := parse(t, nil, "vlan", 5, "vlanQoS", 3, "trust", "off", "spoofchk", "on", "max_tx_rate", 100, "driver", "iavf", "rebind", true,
		"mtu", 9000, "runtimeConfig", object{"bandwidth": object{"egressRate": 25_000_000}})
	must(t, err)
	over := vfconfig.Config{VLAN: new(7), VLANProto: "802.1AD", Trust: "on", LinkState: "enable", MaxTxRate: new(0), MinTxRate: new(1),
		Driver: "vfio-pci", Rebind: new(false), MTU: new(1400)}
	got, err := cfg.mergeSettings(&over, inConflist)
	want := vfconfig.Config{VLAN: new(7), VLANQoS: new(3), VLANProto: "802.1AD", SpoofChk: "on", Trust: "on", LinkState: "enable",
		MinTxRate: new(1), MaxTxRate: new(25), MTU: new(1400), Driver: "vfio-pci", Rebind: new(false)}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := cfg.mergeSettings(&vfconfig.Config{MinTxRate: new(30)}, inConflist); plugin.Code(err) != plugin.CodeConfig ||
		err.Error() != "min_tx_rate 30: more than max_tx_rate 25" {
		t.Error(err)
	}
}

// TestIGBClaimSettings: ADD sets the settings of each VF's class and claim, which override the conflist, on the PF. CHECK compares them
// all, and DEL restores the VFs.
func TestIGBClaimSettings(t *testing.T) {
	l := newIGB(t)
	keys := []any{"vlan", 100, "spoofchk", "off", "max_tx_rate", 100}
	first, second := l.nic.VFs[0].Device, l.nic.VFs[1].Device
	l.sriov.claims = filepath.Join(t.TempDir(), "claims")
	l.serveClaims(claimDevice(0, first, vfconfig.Config{VLAN: new(200), VLANQoS: new(3), Trust: "on", MAC: "02:00:00:00:aa:07",
		MTU: new(1400)},
		"mac", "mtu"),
		claimed1(1, second))
	a := l.add("a", keys...)
	own := l.podLink("net2").MAC.String()
	for i, want := range []string{
		"mac 02:00:00:00:aa:07 vlan 200 qos 3 proto 802.1q spoofchk off trust on state auto min_tx_rate 0 max_tx_rate 100",
		"mac " + own + " vlan 100 qos 0 proto 802.1q spoofchk off trust " + map[bool]string{true: "on", false: "off"}[*l.asPF(1).Trust] +
			" state auto min_tx_rate 0 max_tx_rate 100",
	} {
		if got := formatVF(l.asPF(i)); got != want {
			t.Errorf("PF: %s, want %s", got, want)
		}
	}
	if got := l.podLink("net1"); got.MTU != 1400 || got.MAC.String() != "02:00:00:00:aa:07" {
		t.Errorf("in the pod: %s", describe(got))
	}
	l.OK(a.check(keys...))
	now := l.asPF(0)
	less := now
	less.VLAN = 100
	must(t, l.host.SetVF(l.pf(), 0, now, less))
	l.Fails(a.check(keys...), plugin.CodeStateDiffers, "PF ")
	l.del("a", keys...)
}
