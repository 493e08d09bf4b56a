// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/integration/claimtest"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
)

// claimedDevice returns a device of a claim. result is its index in the claim's allocation results.
func claimedDevice(uid, podClaim string, result int, address string) poddevices.Device {
	return poddevices.Device{Namespace: "shop", Pod: "web-0", Resource: fast, ID: address, Claim: &poddevices.Claim{UID: uid, Namespace: "shop",
		Name: "web-0-" + podClaim, PodClaim: podClaim, Request: "nic", Result: result, Pool: "node-a",
		Device: strings.NewReplacer(":", "-", ".", "-").Replace(address)}}
}

// prepareClaims writes the claim records of devices, and a state file of the kubelet in which the pod with the UID uses these claims.
func (l testLab) prepareClaims(kubelet, uid string, devices ...poddevices.Device) {
	l.Helper()
	records := map[string]claim.Record{}
	for _, d := range devices {
		r := records[d.Claim.UID]
		d.Namespace, d.Pod = "", ""
		r.State, r.Devices = claim.Prepared, append(r.Devices, d)
		records[d.Claim.UID] = r
	}
	var list []claimtest.Claim
	for id, r := range records {
		must(l, claim.Write(l.sriov.claims, r))
		list = append(list, claimtest.Claim{UID: id, Namespace: "shop", Name: r.Claim().Name, Pods: []string{uid}})
	}
	must(l, claimtest.WriteState(kubelet, list...))
}

// TestClaims: the VFs of the pod's claims come after those of its containers, sorted by claim and allocation result, whether the device
// plugin or the kubelet answers. VFs of claims with administrative access stay on the node.
func TestClaims(t *testing.T) {
	admin := claimedDevice("c-0", "a", 0, vf2)
	admin.Claim.Admin = true
	devices := []poddevices.Device{claimedDevice("c-2", "z", 0, vf0), claimedDevice("c-1", "m", 1, "0000:11:02.3"), claimedDevice("c-1", "m",
		0, vf1), admin}
	const want = "[0000:11:02.1 0000:11:02.3 0000:11:02.0]"
	k := &fakeKubelet{containers: []*api.ContainerResources{container("app")}}
	for _, source := range []string{"the daemon", "none"} {
		t.Run(source, func(t *testing.T) {
			l := newLab(t)
			dir := k.serveSocket(t)
			writeCheckpoint(t, dir, checkpointOf())
			*l.devices = devices
			keys := []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-0"}
			l.prepareClaims(dir, "u-0", devices...)
			if source == "none" {
				must(t, os.Remove(l.sriov.socket))
			}
			a := l.add("a", keys...)
			var got []string
			for _, i := range a.result.Interfaces[1:] {
				got = append(got, i.PciID)
			}
			if fmt.Sprint(got) != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if j, err := Holdings(); err != nil || len(j) != 3 || j[0].Claim == nil || j[0].Claim.Request != "nic" {
				t.Errorf("%+v, %v", j, err)
			}
			l.OK(a.check(keys...))
			l.del("a", keys...)
			l.isGolden()
		})
	}
}

// TestClaimUncertain: ADD fails if the pod's claims are unknown or not prepared.
func TestClaimUncertain(t *testing.T) {
	l := newLab(t)
	must(t, os.Remove(l.sriov.socket))
	k := &fakeKubelet{containers: []*api.ContainerResources{container("app")}}
	dir := k.serveSocket(t)
	writeCheckpoint(t, dir, checkpointOf())
	keys := []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-0"}
	l.prepareClaims(dir, "u-0", claimedDevice("c-0", "a", 0, vf0))
	must(t, os.RemoveAll(l.sriov.claims))
	o := l.Call("ADD", "a", keys...)
	l.Fails(o, plugin.CodeTryAgain, "the pod has claim shop/web-0-a: the claim is not prepared: it has no record in "+l.sriov.claims)
	l.wantHint(o, "check that sriov-device-plugin is running")
	l.prepareClaims(dir, "u-0", claimedDevice("c-0", "a", 0, vf0))
	must(t, os.WriteFile(filepath.Join(dir, "dra_manager_state"), []byte("{}"), 0o600))
	l.Fails(l.Call("ADD", "a", keys...), plugin.CodeTryAgain, "the pod may have claim shop/web-0-a")
	l.isGolden()
}

// TestClaimOfOtherResource: ADD fails if the configuration does not list the resource of a claim, whether the device plugin or the
// kubelet answers. It succeeds if another network attaches the VF, or if the claim has administrative access.
func TestClaimOfOtherResource(t *testing.T) {
	const third = "example.com/third"
	k := &fakeKubelet{containers: []*api.ContainerResources{container("app")}}
	for _, source := range []string{"the daemon", "none"} {
		t.Run(source, func(t *testing.T) {
			l := newLab(t)
			dir := k.serveSocket(t)
			writeCheckpoint(t, dir, checkpointOf())
			own, other := claimedDevice("c-1", "m", 0, vf1), claimedDevice("c-2", "z", 0, vf0)
			other.Resource = third
			*l.devices = []poddevices.Device{own, other}
			if source == "none" {
				must(t, os.Remove(l.sriov.socket))
			}
			l.prepareClaims(dir, "u-0", own, other)
			keys := []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-0"}
			o := l.Call("ADD", "a", keys...)
			l.Fails(o, plugin.CodeConfig, "VF "+vf0+" of claim shop/web-0-z: its resource "+third+" is missing from the configuration of sriov")
			l.wantHint(o, "add "+third+" to resources, or to otherResources if another network attaches its VFs or the pod uses them directly")
			l.isGolden()
			a := l.add("a", append(keys, "otherResources", []any{third})...)
			if got := a.result.Interfaces; len(got) != 2 || got[1].PciID != vf1 {
				t.Errorf("%+v", got)
			}
			l.del("a", keys...)
			other.Claim.Admin = true
			*l.devices = []poddevices.Device{own, other}
			l.prepareClaims(dir, "u-0", own, other)
			l.add("a", keys...)
			l.del("a", keys...)
		})
	}
}

// TestSharedClaim: pods that share a claim get the VF one after another, never at the same time.
func TestSharedClaim(t *testing.T) {
	l := newLab(t)
	*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, vf0)}
	l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
	l.add("a")
	other := []any{"CNI_NETNS", kerneltest.NewPod(t).Path}
	o := l.Call("ADD", "b", other...)
	l.Fails(o, plugin.CodeDevice, "VF "+vf0+": pod shop/web-0 has it since")
	if !strings.Contains(o.Failure.Details, "use a ResourceClaimTemplate to give each pod its own claim") {
		t.Error(o.Failure.Details)
	}
	l.del("a")
	l.OK(l.Call("ADD", "b", other...))
	l.OK(l.Call("DEL", "b", other...))
	l.isGolden()
}

func TestResetClaimed(t *testing.T) {
	l := newLab(t)
	a, err := pci.ParseAddress(vf0)
	must(t, err)
	o := ResetOptions{Sysfs: l.sriov.sysfs, Claims: l.sriov.claims, Address: a, Out: t.Output(), Log: slog.New(slog.DiscardHandler)}
	l.prepareClaims(t.TempDir(), "u-0", claimedDevice("c-0", "a", 0, vf0))
	if err := Reset(o); plugin.Code(err) != plugin.CodeDevice || !strings.Contains(err.Error(), "belongs to claim shop/web-0-a since") {
		t.Errorf("got %v", err)
	}
	must(t, os.WriteFile(filepath.Join(l.sriov.claims, "c-0"), nil, 0o600))
	if err := Reset(o); plugin.Code(err) != plugin.CodeDevice || !strings.Contains(err.Error(), "UID c-0") {
		t.Errorf("got %v", err)
	}
	must(t, claim.Remove(l.sriov.claims, "c-0"), Reset(o))
}

// TestReturnClaim checks that RestoreClaim restores the VFs of a claim if the runtime never calls DEL: also if the pod's namespace
// still exists, after changes by a tenant, and with a driver that creates no interface. VFs of other claims stay in their pods.
func TestReturnClaim(t *testing.T) {
	l := newLab(t)
	devices := []poddevices.Device{claimedDevice("c-0", "a", 0, vf0), claimedDevice("c-0", "a", 1, vf1), claimedDevice("c-1", "b", 0, vf2)}
	*l.devices = devices
	l.prepareClaims(t.TempDir(), "u-0", devices...)
	l.add("a")
	l.changeAsTenant("net2")
	var list []pci.Address
	for _, d := range devices[:2] {
		a, err := pci.ParseAddress(d.ID)
		must(t, err)
		list = append(list, a)
	}
	log := slog.New(slog.DiscardHandler)
	for range 2 {
		must(t, RestoreClaim(l.sriov.sysfs, "c-0", list[:1], log))
	}
	if left, err := Holdings(); err != nil || len(left) != 1 || left[0].Claim.UID != "c-1" || !left[0].Ready || left[0].Gone() {
		t.Errorf("%+v, %v", left, err)
	}
	must(t, RestoreClaim(l.sriov.sysfs, "c-1", nil, log))
	l.isGolden()
	l.del("a")
	must(t, os.WriteFile(l.journalOf(vf0), []byte("{"), 0o600))
	if err := RestoreClaim(l.sriov.sysfs, "c-0", list, log); err == nil || !strings.Contains(err.Error(), "journal of VF "+vf0) {
		t.Errorf("got %v", err)
	}
	must(t, os.Remove(l.journalOf(vf0)))
}

// TestClaimEnds: the driver unprepares a claim during an ADD, which then changes nothing, even if the device plugin has already
// returned the VF.
func TestClaimEnds(t *testing.T) {
	l := newLab(t)
	*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, vf0)}
	l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
	r, err := claim.Read(l.sriov.claims, "c-0")
	r.State = claim.Preparing
	must(t, err, claim.Write(l.sriov.claims, r))
	l.Fails(l.Call("ADD", "a"), plugin.CodeTryAgain, "VF "+vf0+" of claim shop/web-0-a: the claim is not prepared")
	must(t, claim.Remove(l.sriov.claims, "c-0"))
	l.Fails(l.Call("ADD", "a"), plugin.CodeTryAgain, "VF "+vf0+" of claim shop/web-0-a")
	l.isGolden()
}

// TestSettle: FreeOrphan restores an orphaned VF, and fails if a pod still has the VF.
func TestSettle(t *testing.T) {
	l := newLab(t)
	a, err := pci.ParseAddress(vf1)
	must(t, err)
	log := slog.New(slog.DiscardHandler)
	must(t, FreeOrphan(l.sriov.sysfs, a, "c-0", log))
	*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, vf1)}
	l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
	l.add("a")
	must(t, FreeOrphan(l.sriov.sysfs, a, "c-0", log))
	if err := FreeOrphan(l.sriov.sysfs, a, "c-1", log); err == nil || !strings.Contains(err.Error(), "VF "+vf1+": pod shop/web-0 has it since") {
		t.Errorf("got %v", err)
	}
	l.endPod(vf1)
	must(t, FreeOrphan(l.sriov.sysfs, a, "c-1", log))
	l.OK(l.Call("DEL", "a", "CNI_NETNS", ""))
	l.isGolden()
}

// TestSettleUnseen: a daemon in a container does not see the folder of namespaces. FreeOrphan must not take a VF from a live pod there.
func TestSettleUnseen(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	a, err := pci.ParseAddress(vf1)
	must(t, err)
	*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, vf1)}
	l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
	l.add("a")
	netns := ""
	at := func(path string) {
		h, err := lockKnown(a)
		must(t, err)
		defer h.close()
		j, _, err := h.load()
		must(t, err)
		netns, j.Netns = j.Netns, path
		must(t, h.save(j))
	}
	at("/run/unseen/ns")
	if err := FreeOrphan(l.sriov.sysfs, a, "c-1", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "pod shop/web-0 has it since") {
		t.Errorf("got %v", err)
	}
	at(netns)
	l.podLink("net1")
	l.del("a")
	l.isGolden()
}

// TestClaimAddresses: after ADD, the journal of a claim's VF has its addresses.
func TestClaimAddresses(t *testing.T) {
	l := newLab(t, "ipam", object{"type": "host-local", "subnet": "10.7.0.0/24"}, "vlan", nil)
	*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, vf0)}
	l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
	l.add("a")
	h, err := Holdings()
	if err != nil || len(h) != 1 || !h[0].Ready || fmt.Sprint(h[0].IPs) != "[10.7.0.2/24]" || h[0].MAC == "" || h[0].Pod != "shop/web-0" {
		t.Errorf("%+v, %v", h, err)
	}
	l.del("a")
	l.isGolden()
}

// TestClaimBoundBefore: Prepare has bound a function without a PF to vfio-pci, and its record has the MAC for the result. A PF lets the
// program in user space choose.
func TestClaimBoundBefore(t *testing.T) {
	for want, node := range map[string]func(*testing.T, ...any) testLab{"": newLab, "02:00:00:00:00:07": newGuest} {
		t.Run(want, func(t *testing.T) {
			l := node(t)
			pcitest.Set(t, l.sriov.sysfs, "0000:11:00.0", "sriov_numvfs", map[bool]string{true: "4", false: "3"}[want == ""])
			pcitest.Kernel{}.Start(t, l.sriov.sysfs)
			must(t, pci.Bind(t.Context(), l.sriov.sysfs, address(t, vf0), "vfio-pci"))
			*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, vf0)}
			l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
			r, err := claim.Read(l.sriov.claims, "c-0")
			r.Bound = []claim.Binding{{ID: vf0, Driver: "vfio-pci", Former: "iavf", MAC: "02:00:00:00:00:07"}}
			must(t, err, claim.Write(l.sriov.claims, r))
			if i := l.add("a").result.Interfaces; len(i) != 2 || i[1].Mac != want {
				t.Errorf("%+v", i[1])
			}
			if h, err := Holdings(); err != nil || len(h) != 1 || !h[0].Ready || h[0].MAC != want || h[0].Userspace != "vfio-pci" {
				t.Errorf("%+v, %v", h, err) // the status of the claim has this
			}
			l.del("a")
		})
	}
}

// TestClaimedPF: a claim may contain a whole PF that has no VFs.
func TestClaimedPF(t *testing.T) {
	const pf = "0000:11:00.0"
	l := newLab(t)
	_, err := l.host.AddVeth(kernel.Veth{Host: "ens0f0", Pod: "ens0f0peer", MTU: 1500})
	must(t, err)
	t.Cleanup(func() { must(t, l.host.DelLink("ens0f0"), l.host.DelLink("ens0f0peer")) })
	before := describe(l.link("ens0f0"))
	*l.devices = []poddevices.Device{claimedDevice("c-0", "a", 0, pf)}
	l.prepareClaims(t.TempDir(), "u-0", *l.devices...)
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "PCI function "+pf+" is not a VF of this node")
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	a, err := pci.ParseAddress(pf)
	must(t, err, pci.SetNumVFs(t.Context(), l.sriov.sysfs, a, 0))
	l.add("a")
	l.podLink("net1")
	l.del("a")
	if got := describe(l.link("ens0f0")); got != before {
		t.Errorf("got %s, want %s", got, before)
	}
	(*l.devices)[0].Claim = nil
	l.Fails(l.Call("ADD", "a"), plugin.CodeDevice, "PCI function "+pf+" is not a VF of this node")
}

// TestHoldingGone: in a container that does not see the folder of namespaces, Gone must return false.
func TestHoldingGone(t *testing.T) {
	folder := t.TempDir()
	for netns, gone := range map[string]bool{
		filepath.Join(folder, "ended"):    true,
		filepath.Join(folder, "no/ended"): false,
		"/proc/4194305/ns/net":            true, // above the highest PID
		folder:                            false,
	} {
		if got := (Holding{Netns: netns}).Gone(); got != gone {
			t.Errorf("%s: %t", netns, got)
		}
	}
}
