// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// claimRecord returns the record of a claim of one pod, with one VF and admin access to another pod's.
func claimRecord() claim.Record {
	of := func(request, id string, result int, admin bool) poddevices.Device {
		return poddevices.Device{Resource: "example.com/fast", ID: id, Claim: &poddevices.Claim{UID: "u1", Namespace: "shop",
			Name: "web-2-vf-x7k2p", Request: request, Result: result, Pool: "node",
			Device: strings.NewReplacer(":", "-", ".", "-").Replace(id), Admin: admin}}
	}
	r := claim.Record{State: claim.Prepared, Reserved: []claim.Consumer{{Resource: "pods", Name: "web-2", UID: "p1"}},
		Devices: []poddevices.Device{of("see", "0000:15:02.0", 1, true), of("vf", "0000:15:02.1", 0, false)}}
	r.Devices[1].Config = &vfconfig.Config{VLAN: new(100), Trust: "on"}
	return r
}

// TestSRIOVLsClaims: a claim's VF is listed as taken, with the request, the pod and the settings.
func TestSRIOVLsClaims(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "claims")
	if err := claim.Write(dir, claimRecord()); err != nil {
		t.Fatal(err)
	}
	flags := append(labFlags(t), "--claims-dir", dir)
	status, stdout, stderr := runSRIOV(t, flags, "ls")
	const want = `
0000:15:02.0  ens1f0  0       1     iavf    example.com/fast  shop/web-1?[31m  mixed  -
0000:15:02.1  ens1f0  1       1     iavf    example.com/fast  shop/web-2       -      -

CLAIM                REQUEST  POD         DEVICE        INTERFACE  RESOURCE          STATE     SETTINGS
shop/web-2-vf-x7k2p  vf       shop/web-2  0000:15:02.1  -          example.com/fast  prepared  vlan 100, trust "on"
shop/web-2-vf-x7k2p  see      shop/web-2  0000:15:02.0  admin      example.com/fast  prepared  -
`
	if !strings.HasSuffix(stdout, want) || status != 0 || stderr != "" {
		t.Errorf("status %d, %s\n%s\nwant at its end%s", status, stderr, stdout, want)
	}
	_, stdout, _ = runSRIOV(t, flags, "ls", "-o", "json")
	var list []struct {
		Address string
		Holder  *poddevices.Device
		Claims  []sriovClaim
	}
	if err := json.Unmarshal([]byte(stdout), &list); err != nil || len(list) != 6 {
		t.Fatalf("%v: %s", err, stdout)
	}
	if last := list[5]; len(last.Claims) != 1 || last.Claims[0].Claim != "shop/web-2-vf-x7k2p" || last.Holder.Claim.UID != "u1" {
		t.Errorf("got %+v", last)
	}
	if seen := list[4]; len(seen.Claims) != 1 || !seen.Claims[0].Admin || seen.Holder.Pod == "" {
		t.Errorf("got %+v", seen)
	}
	if _, stdout, _ = runSRIOV(t, flags, "explain", "0000:15:02.1"); !strings.Contains(stdout,
		`  claim shop/web-2-vf-x7k2p, request vf, has it as example.com/fast; no pod has it attached yet; settings: vlan 100, trust "on"`) {
		t.Errorf("got\n%s", stdout)
	}
	if _, stdout, _ = runSRIOV(t, flags, "explain", "0000:15:02.0"); !strings.Contains(stdout, "request see, has it as example.com/fast; admin access") {
		t.Errorf("got\n%s", stdout)
	}
}

// TestSRIOVLsClaimTorn: an unreadable record is reported, and all other claims are still listed.
func TestSRIOVLsClaimTorn(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "u2"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := runSRIOV(t, append(labFlags(t), "--claims-dir", dir), "ls")
	if status != 0 || !strings.Contains(stderr, "the list of claims is incomplete: record of the claim with UID u2") ||
		!strings.Contains(stdout, "0000:15:02.1") || strings.Contains(stdout, "CLAIM") {
		t.Errorf("status %d, %s\n%s", status, stderr, stdout)
	}
}

// TestDeviceOf: pod and interface come from the VF's journal, which is ignored if another claim uses the VF.
func TestDeviceOf(t *testing.T) {
	r := claimRecord()
	address, err := pci.ParseAddress("0000:15:02.1")
	if err != nil {
		t.Fatal(err)
	}
	holding := sriov.Holding{Address: address, Pod: "shop/web-3", Name: "net1", Claim: &poddevices.Claim{UID: "u1"}}
	got := deviceOf(r, r.Devices[1], []sriov.Holding{holding})
	if diff := cmp.Diff([]string{"shop/web-3", "net1"}, []string{got.Pod, got.Interface}); diff != "" {
		t.Error(diff)
	}
	if s := got.describe(); !strings.Contains(s, "it is net1 of pod shop/web-3") {
		t.Error(s)
	}
	holding.Claim.UID = "u2"
	if got = deviceOf(r, r.Devices[1], []sriov.Holding{holding}); got.Pod != "shop/web-2" || got.Interface != "" {
		t.Errorf("got %+v", got)
	}
	r.Reserved = append(r.Reserved, r.Reserved[0])
	if got = deviceOf(r, r.Devices[1], nil); got.Pod != "" {
		t.Errorf("got %+v", got)
	}
}

// TestSRIOVExplainPublished: the output about a device has its attributes and taints, and the attributes that only others have.
func TestSRIOVExplainPublished(t *testing.T) {
	first, _ := pci.ParseAddress("0000:11:02.0")
	second, _ := pci.ParseAddress("0000:15:02.1")
	n := &sriovNode{config: &pool.Config{Resources: []pool.Resource{{Prefix: "example.com", Name: "fast", API: pool.DRA}}},
		slices: map[string]poddevices.Published{
			first.String(): {Pool: "node-1", Device: "0000-11-02-0", Attributes: map[string]string{"sriov.podlace.io/vf": "0",
				"resource.kubernetes.io/numaNode": "1"}},
			second.String(): {Pool: "node-1", Device: "0000-15-02-1", Attributes: map[string]string{"sriov.podlace.io/vf": "1"},
				Taints: []string{"sriov.podlace.io/link-down=ens1f0:NoSchedule"}}}}
	for _, c := range []struct {
		device pci.Address
		asked  error
		want   string
	}{
		{first, nil, `  by DRA: device 0000-11-02-0 of pool node-1
    resource.kubernetes.io/numaNode  1
    sriov.podlace.io/vf              0
`},
		{second, nil, `  by DRA: device 0000-15-02-1 of pool node-1
    sriov.podlace.io/vf  1
    it lacks resource.kubernetes.io/numaNode, which other devices have: a CEL expression must test for it first
    taint sriov.podlace.io/link-down=ens1f0:NoSchedule
`},
		{pci.Address{}, nil, "  by DRA, but in no ResourceSlice at present\n"},
		{pci.Address{}, os.ErrDeadlineExceeded, "  by DRA; its attributes and taints are unknown: i/o timeout\n"},
	} {
		var out strings.Builder
		n.pluginErr = c.asked
		n.printPublished(&out, pool.Explanation{Device: c.device, Resource: "example.com/fast"})
		if diff := cmp.Diff(c.want, out.String()); diff != "" {
			t.Errorf("%s: -want +got\n%s", c.device, diff)
		}
	}
	var out strings.Builder
	if n.printPublished(&out, pool.Explanation{Resource: "example.com/old"}); out.String() != "" {
		t.Errorf("a resource of the device plugin API: %s", out.String())
	}
}

// TestAddUnrecorded: a pod's VF is listed even without the record of its claim.
func TestAddUnrecorded(t *testing.T) {
	var attached []sriov.Holding
	for id, of := range map[string]*poddevices.Claim{"0000:15:02.1": {UID: "u1", Namespace: "shop", Name: "c"}, "0000:15:02.0": nil} {
		a, err := pci.ParseAddress(id)
		if err != nil {
			t.Fatal(err)
		}
		attached = append(attached, sriov.Holding{Address: a, Pod: "shop/web-3", Name: "net1", Claim: of})
	}
	got := addUnrecorded(nil, attached)
	want := []sriovClaim{{Claim: "shop/c", UID: "u1", State: "no record", Device: "0000:15:02.1", Pod: "shop/web-3", Interface: "net1"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if again := addUnrecorded(got, attached); len(again) != 1 {
		t.Errorf("listed twice: %+v", again)
	}
	n := &sriovNode{snapshot: &pci.Snapshot{Devices: []pci.Device{{Address: attached[0].Address}, {Address: attached[1].Address}}},
		held: map[string]poddevices.Device{}, claims: got}
	n.addClaimed()
	for _, d := range n.devices() {
		if isHeld := d.Address.String() == "0000:15:02.1"; isHeld != (d.Holder != nil) || isHeld && n.holder(*d.Holder) != "shop/web-3" {
			t.Errorf("%+v", d)
		}
	}
}
