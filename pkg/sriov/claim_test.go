// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// claimed is a device of a claim, the result with an index.
func claimed(uid, podClaim string, result int, address string) allocation.Device {
	return allocation.Device{Namespace: "shop", Pod: "web-0", Resource: fast, ID: address, Claim: &allocation.Claim{UID: uid, Namespace: "shop",
		Name: "web-0-" + podClaim, PodClaim: podClaim, Request: "nic", Result: result, Pool: "node-a",
		Device: strings.NewReplacer(":", "-", ".", "-").Replace(address)}}
}

// prepare writes the records of devices, and what the kubelet writes of them for a pod with a UID.
func (l lab) prepare(kubelet, uid string, devices ...allocation.Device) {
	l.Helper()
	records := map[string]claim.Record{}
	for _, d := range devices {
		r := records[d.Claim.UID]
		d.Namespace, d.Pod = "", ""
		r.State, r.Devices = claim.Prepared, append(r.Devices, d)
		records[d.Claim.UID] = r
	}
	var list []any
	for id, r := range records {
		must(l, claim.Write(l.sriov.claims, r))
		list = append(list, object{"ClaimUID": id, "ClaimName": r.Claim().Name, "Namespace": "shop", "PodUIDs": object{uid: object{}},
			"DriverState": object{claim.Driver: object{"Devices": []any{}}}})
	}
	text, err := json.Marshal(object{"apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", "kind": "DRACheckpoint", "ClaimInfoStateList": list})
	must(l, err)
	data, err := json.Marshal(object{"Data": string(text), "Checksum": crc32.ChecksumIEEE(text)})
	must(l, err, os.WriteFile(filepath.Join(kubelet, "dra_manager_state"), data, 0o600))
}

// TestClaims: a pod gets the VFs of its claims behind those of its containers, ordered by claim and result, whoever tells of them; those
// that an administrator looks at stay where they are.
func TestClaims(t *testing.T) {
	admin := claimed("c-0", "a", 0, vf2)
	admin.Claim.Admin = true
	devices := []allocation.Device{claimed("c-2", "z", 0, vf0), claimed("c-1", "m", 1, "0000:11:02.3"), claimed("c-1", "m", 0, vf1), admin}
	const want = "[0000:11:02.1 0000:11:02.3 0000:11:02.0]"
	k := &kubelet{containers: []*api.ContainerResources{container("app")}}
	for _, source := range []string{"the daemon", "an older daemon", "nobody"} {
		t.Run(source, func(t *testing.T) {
			l := newLab(t)
			dir := k.serve(t)
			writeCheckpoint(t, dir, checkpoint())
			*l.devices = []allocation.Device{}
			keys := []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-0"}
			switch source {
			case "the daemon":
				*l.devices, *l.claims = devices, true
			case "nobody":
				must(t, os.Remove(l.sriov.socket))
				fallthrough
			default:
				l.prepare(dir, "u-0", devices...)
			}
			a := l.add("a", keys...)
			var got []string
			for _, i := range a.result.Interfaces[1:] {
				got = append(got, i.PciID)
			}
			if fmt.Sprint(got) != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if j, err := journals(); err != nil || len(j) != 3 || j[0].Claim == nil || j[0].Claim.Request != "nic" {
				t.Errorf("%+v, %v", j, err)
			}
			l.OK(a.check(keys...))
			l.del("a", keys...)
			l.isGolden()
		})
	}
}

// set is a device of the first claim with settings of its class and, if these are named, of the claim.
func set(result int, address string, c vfconfig.Config, claimed ...string) allocation.Device {
	d := claimed1(result, address)
	c.Claimed, d.Config = claimed, &c
	return d
}

func claimed1(result int, address string) allocation.Device {
	return claimed("c-0", "a", result, address)
}

// TestClaimSettings: each VF gets what its class and its claim set, and what the conflist sets of it besides; others get the latter only.
func TestClaimSettings(t *testing.T) {
	l := newLab(t, "ipam", ranges(), "mtu", 1300)
	*l.claims = true
	*l.devices = []allocation.Device{
		set(0, vf1, vfconfig.Config{MAC: "02:00:00:00:00:01", IfName: "data", IPs: []string{"10.61.0.77", "fd00:61::77/64"}}, "mac", "ifName", "ips"),
		set(1, vf2, vfconfig.Config{MTU: new(1350), IfName: "vf{index}"}),
		claimed1(2, "0000:11:02.3"),
	}
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

// allocate0 gives a VF to the pod by the device plugin API, beside those that it has.
func (l lab) allocate0(address string) {
	*l.devices = append(*l.devices, allocation.Device{Namespace: "shop", Pod: "web-0", Container: "app", Resource: fast, ID: address})
}

// TestClaimSettingsRefused: what cannot be applied as it stands in the record fails the ADD, before anything is changed.
func TestClaimSettingsRefused(t *testing.T) {
	l := newLab(t)
	*l.claims = true
	const sets = "VF " + vf0 + ", as claim shop/web-0-a sets it: "
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
		{vfconfig.Config{IPs: []string{"10.61.0.77"}}, sets + "VFs have no addresses here: the configuration has no ipam", nil},
		{vfconfig.Config{IPs: []string{"10.61.0"}}, sets + `ips "10.61.0": want an address`, []any{"ipam", ranges()}},
		{vfconfig.Config{IfName: "eth0"}, sets + "ifName eth0: the pod has an interface of this name", nil},
		{vfconfig.Config{IfName: "data"}, sets + "ifName data: the runtime looks for eth0", []any{"prevResult", nil}},
	} {
		*l.devices = []allocation.Device{set(0, vf0, c.config)}
		if len(c.config.Unknown) > 0 { // as only another version can write it
			*l.devices, *l.claims = nil, false
			dir := l.lateRecord(vf0, `"queues":4`)
			c.keys = []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-0"}
		}
		l.Fails(l.Call("ADD", "a", c.keys...), plugin.CodeConfig, c.says)
		*l.claims = true
	}
	*l.devices = []allocation.Device{set(0, vf0, vfconfig.Config{IfName: "a"}), set(1, vf1, vfconfig.Config{IfName: "a"})}
	l.Fails(l.Call("ADD", "a"), plugin.CodeConfig, "two interfaces of the pod would be named a")
	*l.devices = []allocation.Device{set(0, vf0, vfconfig.Config{VLAN: new(100)})} // the PF of a lab has no interface: no VF without its VLAN
	l.Fails(l.Call("ADD", "a"), plugin.CodeKernelFeature, "vlan: the PF of VF "+vf0+" cannot be told")
	l.isGolden()
}

// lateRecord writes the record of a claim with a VF and a key of its settings, and returns the folder of the kubelet.
func (l lab) lateRecord(address, key string) string {
	l.Helper()
	dir := (&kubelet{containers: []*api.ContainerResources{container("app")}}).serve(l.T)
	writeCheckpoint(l.T, dir, checkpoint())
	l.prepare(dir, "u-0", set(0, address, vfconfig.Config{MTU: new(1300)}))
	path := filepath.Join(l.sriov.claims, "c-0")
	data, err := os.ReadFile(path)
	must(l, err, os.WriteFile(path, []byte(strings.Replace(string(data), `"mtu":1300`, key, 1)), 0o600))
	return dir
}

// TestClaimAndAnnotation: the annotation wins over the class, and must not contradict the claim.
func TestClaimAndAnnotation(t *testing.T) {
	l := newLab(t, "ipam", ranges())
	*l.claims = true
	config := vfconfig.Config{MAC: "02:00:00:00:00:01", IfName: "data", IPs: []string{"10.61.0.77"}}
	for _, c := range []struct{ text, says string }{
		{`{"data": {"mac": "02:00:00:00:00:02"}}`,
			`annotation podlace.io/vfs: data: mac 02:00:00:00:00:02: claim shop/web-0-a sets mac "02:00:00:00:00:01"`},
		{`{"data": {"name": "x"}}`, `annotation podlace.io/vfs: data: name x: claim shop/web-0-a sets ifName "data"`},
		{`{"data": {"ips": ["10.61.0.78"]}}`,
			`annotation podlace.io/vfs: data: ips ["10.61.0.78"]: claim shop/web-0-a sets ips ["10.61.0.77"]`},
		{`{"data": {"ips": []}}`, `annotation podlace.io/vfs: data: ips []: claim shop/web-0-a sets ips ["10.61.0.77"]`},
		{`{"net1": {"name": "x"}}`, `the pod has no VF that is "net1"`},
	} {
		*l.devices = []allocation.Device{set(0, vf0, config, "mac", "ifName", "ips")}
		l.Fails(l.Call("ADD", "a", "runtimeConfig", annotated(c.text)), plugin.CodeConfig, c.says)
	}
	l.isGolden()
	l.add("a", "runtimeConfig", annotated(`{"data": {"mac": "02:00:00:00:00:01", "ips": ["10.61.0.77"], "name": "data"}}`))
	l.del("a")
	*l.devices = []allocation.Device{set(0, vf0, config)}
	a := l.add("a", "reportIPs", true, "runtimeConfig", annotated(`{"data": {"mac": "02:00:00:00:00:02", "name": "x"}}`))
	if got := l.podLink("x").MAC.String(); got != "02:00:00:00:00:02" || len(a.result.IPs) < 2 || a.result.IPs[1].Address.IP.String() != "10.61.0.77" {
		t.Errorf("MAC %s, %v", got, a.result.IPs)
	}
	l.del("a")
}

// TestClaimOfNamedVF: called with the VF, as by Multus, the settings of its claim hold, and the VF of another pod's claim is refused.
func TestClaimOfNamedVF(t *testing.T) {
	l := newLab(t)
	dir := (&kubelet{containers: []*api.ContainerResources{container("app")}}).serve(t)
	l.prepare(dir, "u-0", set(0, vf0, vfconfig.Config{MTU: new(1350)}))
	keys := func(uid string) []any {
		return []any{"kubeletDir", dir, "deviceID", vf0, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=" + uid,
			"prevResult", nil}
	}
	l.Fails(l.Call("ADD", "b", keys("u-1")...), plugin.CodeDevice, "VF "+vf0+": claim shop/web-0-a has it, which is not of this pod")
	l.Fails(l.Call("ADD", "b", "deviceID", vf0), plugin.CodeTryAgain, "whether the pod has VF "+vf0+" of claim shop/web-0-a: ")
	l.isGolden()
	l.add("a", keys("u-0")...)
	if got := l.podLink("eth0").MTU; got != 1350 {
		t.Errorf("mtu %d", got)
	}
	l.del("a", keys("u-0")...)
	l.add("a", append(keys("u-1"), "deviceID", vf1)...) // no claim has this one
	l.del("a", keys("u-1")...)
}

// TestMergedSettings: the PF is told what the last source says, and the pod's own limit stays one.
func TestMergedSettings(t *testing.T) {
	cfg, err := parse(t, nil, "vlan", 5, "vlanQoS", 3, "trust", "off", "spoofchk", "on", "max_tx_rate", 100, "driver", "iavf", "rebind", true,
		"mtu", 9000, "runtimeConfig", object{"bandwidth": object{"egressRate": 25_000_000}})
	must(t, err)
	over := vfconfig.Config{VLAN: new(7), VLANProto: "802.1AD", Trust: "on", LinkState: "enable", MaxTxRate: new(0), MinTxRate: new(1),
		Driver: "vfio-pci", Rebind: new(false), MTU: new(1400)}
	got, err := cfg.merge(&over, inConflist)
	want := vfSettings{pfSettings: pfSettings{VLAN: new(7), QoS: new(3), Proto: "802.1ad", SpoofCheck: new(true), Trust: new(true), LinkState: "enable",
		MinRate: new(1), MaxRate: new(25)}, MTU: 1400, Driver: "vfio-pci"}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(vfSettings{})); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := cfg.merge(&vfconfig.Config{MinTxRate: new(30)}, inConflist); plugin.Code(err) != plugin.CodeConfig ||
		err.Error() != "min_tx_rate 30: more than max_tx_rate 25" {
		t.Error(err)
	}
}

// TestClaimUncertain: a pod whose claims are not known, or not prepared, does not start.
func TestClaimUncertain(t *testing.T) {
	l := newLab(t)
	*l.devices = []allocation.Device{}
	k := &kubelet{containers: []*api.ContainerResources{container("app")}}
	dir := k.serve(t)
	writeCheckpoint(t, dir, checkpoint())
	keys := []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-0"}
	l.prepare(dir, "u-0", claimed("c-0", "a", 0, vf0))
	must(t, os.RemoveAll(l.sriov.claims))
	o := l.Call("ADD", "a", keys...)
	l.Fails(o, plugin.CodeTryAgain, "the pod has claim shop/web-0-a: it is not prepared: there is no record of it in "+l.sriov.claims)
	l.hints(o, "does sriov-device-plugin run?")
	l.prepare(dir, "u-0", claimed("c-0", "a", 0, vf0))
	must(t, os.WriteFile(filepath.Join(dir, "dra_manager_state"), []byte("{}"), 0o600))
	l.Fails(l.Call("ADD", "a", keys...), plugin.CodeTryAgain, "the pod may have claim shop/web-0-a")
	l.isGolden()
}

// TestSharedClaim: the VF of a claim that pods share goes from one to the next, and is never in two.
func TestSharedClaim(t *testing.T) {
	l := newLab(t)
	*l.devices, *l.claims = []allocation.Device{claimed("c-0", "a", 0, vf0)}, true
	l.add("a")
	other := []any{"CNI_NETNS", kerneltest.NewPod(t).Path}
	o := l.Call("ADD", "b", other...)
	l.Fails(o, plugin.CodeDevice, "VF "+vf0+": pod shop/web-0 has it since")
	if !strings.Contains(o.Failure.Details, "a ResourceClaimTemplate gives each pod its own") {
		t.Error(o.Failure.Details)
	}
	l.del("a")
	l.OK(l.Call("ADD", "b", other...))
	l.OK(l.Call("DEL", "b", other...))
	l.isGolden()
}

// TestResetClaimed: a VF that a claim holds is not made as new.
func TestResetClaimed(t *testing.T) {
	l := newLab(t)
	a, err := pci.ParseAddress(vf0)
	must(t, err)
	o := ResetOptions{Sysfs: l.sriov.sysfs, Claims: l.sriov.claims, Address: a, Out: t.Output(), Log: slog.New(slog.DiscardHandler)}
	l.prepare(t.TempDir(), "u-0", claimed("c-0", "a", 0, vf0))
	if err := Reset(o); plugin.Code(err) != plugin.CodeDevice || !strings.Contains(err.Error(), "claim shop/web-0-a has it since") {
		t.Errorf("got %v", err)
	}
	must(t, os.WriteFile(filepath.Join(l.sriov.claims, "c-0"), nil, 0o600))
	if err := Reset(o); plugin.Code(err) != plugin.CodeDevice || !strings.Contains(err.Error(), "UID c-0") {
		t.Errorf("got %v", err)
	}
	must(t, claim.Remove(l.sriov.claims, "c-0"), Reset(o))
}
