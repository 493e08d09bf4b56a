// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/claimtest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

// writeClaim writes the record of a claim with a device for the pod with UID u-0, and its entry in the kubelet's file.
func (l *testLab) writeClaim(resource, id string, admin bool) {
	l.Helper()
	r := claim.Record{State: claim.Prepared, Reserved: []claim.Consumer{{Resource: "pods", Name: "web-0", UID: "u-0"}}, Devices: []poddevices.Device{{Resource: resource, ID: id, Claim: &poddevices.Claim{UID: "c-0",
		Namespace: "shop", Name: "web-0-nic", Request: "nic", Pool: "node-a", Device: "x", Admin: admin}}}}
	if err := claim.Write(l.Claims, r); err != nil {
		l.Fatal(err)
	}
	c := claimtest.Claim{UID: "c-0", Namespace: "shop", Name: "web-0-nic", Pods: []string{"u-0"}}
	if err := claimtest.WriteState(l.Root, c); err != nil {
		l.Fatal(err)
	}
}

// TestClaimed checks that a claimed device is not allocated, keeps its driver, and is in the answers about pods, and that the number of
// VFs on its PF stays. If both the claim's record and the kubelet's file are unreadable, any device may be claimed.
func TestClaimed(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
	config := func(n, driver string) string {
		return `{"pfs": [{"pfName": "ens0f0", "numVfs": ` + n + `}], "resourceList": [{"resourceName": "all"` + driver + `}]}`
	}
	l := prepareLab(t, sysfs, config("2", ""))
	pcitest.Kernel{}.Start(t, sysfs)
	l.writeClaim("example.com/all", vf01, false)
	l.writeCheckpoint()
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/other", "")
	l.start()
	l.awaitDevices("example.com/all", vf00, vf01+"!")
	ask := func(resource string) (poddevices.Answer, error) {
		return poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{Namespace: "shop", Pod: "web-0", UID: "u-0",
			Resources: []string{resource}})
	}
	if a, err := ask("example.com/all"); err != nil || len(a.Devices) != 1 || a.Devices[0].ID != vf01 || a.Devices[0].Pod != "web-0" {
		t.Errorf("%+v, %v", a, err)
	}
	if a, err := ask("example.com/third"); err != nil || len(a.Others) != 1 || a.Others[0].ID != vf01 || len(a.Devices) != 0 {
		t.Errorf("asked for another resource: %+v, %v", a, err)
	}
	record := filepath.Join(l.Claims, "c-0")
	if err := os.Rename(record, l.Root+"/lost"); err != nil {
		t.Fatal(err)
	}
	if a, err := ask("example.com/all"); !errors.Is(err, poddevices.ErrUnprepared) {
		t.Errorf("a pod whose claim has no record gets %+v, %v", a, err)
	}
	if err := os.Rename(l.Root+"/lost", record); err != nil {
		t.Fatal(err)
	}
	l.configure(config("3", ""))
	l.awaitLog("could not configure a device as requested", "cannot change the number of VFs from 2 to 3",
		"VF "+vf01+" belongs to claim shop/web-0-nic")
	write(t, filepath.Join(l.Claims, "c-1"), "{")
	l.configure(config("4", ""))
	l.awaitLog("cannot read records of claims", "UID c-1", "delete them from "+l.Claims)
	l.await("/metrics", "podlace_sriov_claim_records_unreadable 1")
	if strings.Contains(l.log.String(), "the devices of claims are unknown") {
		t.Error("the kubelet has no such claim, and yet any device counts as the claim's")
	}
	write(t, filepath.Join(l.Root, "dra_manager_state"), "{")
	l.configure(config("5", ""))
	l.awaitLog("the devices of claims are unknown", "UID c-1")
	l.awaitLog("could not configure a device as requested", "cannot create 5 VFs", "may belong to a claim")
	data, err := os.ReadFile(filepath.Join(sysfs, "bus/pci/devices", pf0, "sriov_numvfs"))
	if strings.TrimSpace(string(data)) != "2" || err != nil {
		t.Errorf("%s, %v", data, err)
	}
}

// TestAdminClaimed checks that administrative access leaves a device available.
func TestAdminClaimed(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.writeClaim("example.com/one", vf00, true)
	l.kubelet.start()
	l.start()
	l.awaitDevices("example.com/one", vf00, vf01)
}

// TestClaimMetrics: the metrics show the pod that has a device through a claim. The device counts as allocated even right after a
// refused configuration.
func TestClaimMetrics(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoResources("dra"))
	r := l.useRecorder()
	l.writeClaim("example.com/one", vf00, false)
	l.kubelet.start()
	l.start()
	l.awaitInventory(r, "one: "+vf00+" "+vf01)
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+vf00+`",container="",namespace="shop",pod="web-0",resource="example.com/one"} 1`)
	l.configure("{")
	l.awaitLog("refused the new configuration")
	const want = `podlace_sriov_devices{numa="0",resource="example.com/one",state="allocated"} 1`
	for range 10 {
		text, err := l.get("/metrics")
		if err != nil || !strings.Contains(text, want) {
			t.Fatalf("%v: want %s, got\n%s", err, want, text)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// TestSharedClaimMetrics: of the pods that share a claim, the one in the VF's journal has the VF. A journal of an earlier claim has no
// effect.
func TestSharedClaimMetrics(t *testing.T) {
	held := []poddevices.Device{{ID: vf00, Namespace: "shop", Pod: "web-0", Claim: &poddevices.Claim{UID: "c-0"}},
		{ID: vf01, Namespace: "shop", Pod: "web-0", Claim: &poddevices.Claim{UID: "c-1"}}, {ID: vf10, Namespace: "shop", Pod: "web-2"}}
	var attached []sriov.Holding
	for id, uid := range map[string]string{vf00: "c-0", vf01: "c-9", vf10: "c-2"} {
		a, err := pci.ParseAddress(id)
		if err != nil {
			t.Fatal(err)
		}
		attached = append(attached, sriov.Holding{Address: a, Pod: "shop/web-1", Claim: &poddevices.Claim{UID: uid}})
	}
	for i, want := range []string{"web-1", "web-0", "web-2"} {
		if got := nameAttachedPods(held, attached)[i]; got.Pod != want || got.Namespace != "shop" {
			t.Errorf("%s: got pod %s/%s, want shop/%s", got.ID, got.Namespace, got.Pod, want)
		}
	}
}
