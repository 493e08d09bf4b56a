// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/podlace/podlace/integration/claimtest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// TestPrepare prepares and unprepares a claim with both versions of the kubelet's API. Its two requests have the same resource, so the
// variables of each CDI device, which the request's first device has, contain the devices of both. A second Prepare only restores a
// missing CDI specification.
func TestPrepare(t *testing.T) {
	for _, v1beta1 := range []bool{false, true} {
		l := newDRALab(t)
		l.runDriver()
		k := l.register(v1beta1)
		c := newClaim("c-1", "web", deviceResult("a", vf0), deviceResult("b/large", vf2), deviceResult("b/large", vf1))
		l.addClaims(c)
		const want = "a=node-a/0000-11-02-0 podlace.io/vf=c-1-a,sriov.podlace.io/metadata=c-1_a; " +
			"b=node-a/0000-11-02-2 podlace.io/vf=c-1-b.large,sriov.podlace.io/metadata=c-1_b; b=node-a/0000-11-02-1 "
		if diff := cmp.Diff([]string{want}, k.prepareClaims(c)); diff != "" {
			t.Fatal(diff)
		}
		r, err := claim.Read(l.options.Claims, "c-1")
		must(t, err)
		if r.State != claim.Prepared || len(r.Devices) != 3 || r.Devices[1].Resource != fast || r.Devices[1].Claim.PodClaim != "nic" ||
			r.Devices[1].Claim.Result != 1 || r.Reserved[0].UID != "pod-c-1" || r.Devices[1].Claim.Request != "b/large" {
			t.Errorf("%+v", r)
		}
		spec := filepath.Join(l.options.CDI, "sriov.podlace.io-c-1.json")
		must(t, os.Remove(spec))
		k.prepareClaims(c)
		data, err := os.ReadFile(spec)
		must(t, err)
		var s cdi.Spec
		must(t, json.Unmarshal(data, &s))
		if s.Kind != "podlace.io/vf" || len(s.Devices) != 2 || s.Devices[1].Name != "c-1-b.large" ||
			s.Devices[1].ContainerEdits.Env[0] != "PCIDEVICE_EXAMPLE_COM_FAST=0000:11:02.0,0000:11:02.2,0000:11:02.1" ||
			s.Devices[0].ContainerEdits.Env[0] != s.Devices[1].ContainerEdits.Env[0] ||
			!strings.HasPrefix(s.Devices[1].ContainerEdits.Env[1], "PCIDEVICE_EXAMPLE_COM_FAST_INFO={") {
			t.Errorf("%s", data)
		}
		again, err := claim.Read(l.options.Claims, "c-1")
		if diff := cmp.Diff(r, again); diff != "" || err != nil {
			t.Errorf("%v\n%s", err, diff)
		}
		for range 2 {
			if diff := cmp.Diff([]string{"", ""}, k.unprepareClaims("c-1", "unknown")); diff != "" {
				t.Error(diff)
			}
		}
		if got := l.fileNames(l.options.CDI) + l.fileNames(l.options.Claims); got != "" {
			t.Errorf("left: %s", got)
		}
	}
}

// TestPrepareRefuses checks that Prepare refuses an invalid claim with a reason and writes no file.
func TestPrepareRefuses(t *testing.T) {
	elsewhere, other := deviceResult("a", vf0), deviceResult("a", vf0)
	elsewhere.Pool, other.Driver = "node-b", "gpu.example.com"
	unallocated := newClaim("c-1", "web")
	unallocated.Status.Allocation = nil
	for _, c := range []struct {
		title    string
		claim    *resourceapi.ResourceClaim
		resource pool.Resource
		change   func(*Options)
		says     string
	}{
		{title: "not allocated", claim: unallocated, says: "claim shop/web not allocated"},
		{title: "another node", claim: newClaim("c-1", "web", elsewhere),
			says: `claim shop/web: device 0000-11-02-0: pool "node-b": want "node-a", the pool of this node`},
		{title: "no such device", claim: newClaim("c-1", "web", deviceResult("a", "0000:99:00.0")),
			says: `claim shop/web: request a: device 0000-99-00-0 does not exist, or no resource with "api": "dra" has it`},
		{title: "another driver's", claim: newClaim("c-1", "web", other), says: "claim shop/web: the claim has no device of driver sriov.podlace.io"},
		{title: "in use", claim: newClaim("c-1", "web", deviceResult("a", vf0)), says: "claim shop/web: VF 0000:11:02.0 belongs to pod shop/old",
			change: func(o *Options) {
				o.InUse = func(id string) string { return map[string]string{vf0: "belongs to pod shop/old"}[id] }
			}},
		{title: "VFIO without CDI", claim: newClaim("c-1", "web", deviceResult("a", vf0)), resource: pool.Resource{Driver: "vfio-pci"},
			change: func(o *Options) { o.CDI = "" },
			says: "claim shop/web: request a: device 0000:11:02.0 has driver vfio-pci, so its device files need CDI: " +
				"start the daemon with --cdi-dir"},
		{title: "driver not loaded", claim: newClaim("c-1", "web", deviceResult("a", vf0)), resource: pool.Resource{Driver: "nosuch"},
			says: "claim shop/web: bind the driver: bind 0000:11:02.0 to nosuch: the driver is not loaded"},
	} {
		t.Run(c.title, func(t *testing.T) {
			l := newDRALab(t, func(o *Options) {
				if c.change != nil {
					c.change(o)
				}
			})
			l.updateInventory(c.resource, nil)
			l.runDriver()
			l.addClaims(c.claim)
			got := l.register(false).prepareClaims(c.claim)
			if len(got) != 1 || !strings.Contains(got[0], c.says) || c.says == "" && got[0] != "" {
				t.Errorf("got %q, want %q", got, c.says)
			}
			if left := l.fileNames(l.options.CDI) + l.fileNames(l.options.Claims); left != "" && c.title != "driver not loaded" {
				t.Errorf("left: %s", left)
			}
		})
	}
}

// TestForceDeleted: if the API server has allocated a VF to a new claim, Prepare refuses it, with the name of the old claim, until that
// is unprepared.
func TestForceDeleted(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	k := l.register(false)
	old, next := newClaim("c-1", "web-0-vf", deviceResult("a", vf0)), newClaim("c-2", "web-1-vf", deviceResult("a", vf0), deviceResult("a",
		vf1))
	l.addClaims(old, next)
	k.prepareClaims(old)
	want := "claim shop/web-1-vf: VF 0000:11:02.0 still belongs to claim shop/web-0-vf (uid c-1), whose pod has not ended"
	if diff := cmp.Diff([]string{want}, k.prepareClaims(next)); diff != "" {
		t.Error(diff)
	}
	if got := l.fileNames(l.options.Claims); got != "c-1" {
		t.Errorf("records: %s", got)
	}
	k.unprepareClaims("c-1")
	if got := k.prepareClaims(next); !strings.HasPrefix(got[0], "a=node-a/0000-11-02-0 ") {
		t.Error(got)
	}
}

// TestDamagedRecord: a claim with an unreadable record keeps its devices, which are in the kubelet's file, and others can be prepared.
// If that file is unreadable too, none can.
func TestDamagedRecord(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	k := l.register(false)
	must(t, claim.MakeFolder(l.options.Claims), os.WriteFile(filepath.Join(l.options.Claims, "c-9"), []byte("{"), 0o600))
	must(t, claimtest.WriteState(l.options.Kubelet, claimtest.Claim{UID: "c-9", Namespace: "shop", Name: "lost", Pods: []string{"u"},
		Devices: []claimtest.Device{{PoolName: "node-a", DeviceName: "0000-11-02-3"}}}))
	lost, same := newClaim("c-9", "lost", deviceResult("a", vf3)), newClaim("c-2", "same", deviceResult("a", vf3))
	other := newClaim("c-3", "other", deviceResult("a", vf2))
	l.addClaims(lost, same, other)
	if got := k.prepareClaims(lost); !strings.Contains(got[0], "record of the claim with UID c-9") {
		t.Error(got)
	}
	if got := k.prepareClaims(same); !strings.Contains(got[0], "VF "+vf3+" still belongs to claim shop/lost (uid c-9)") {
		t.Error(got)
	}
	if got := k.prepareClaims(other); !strings.HasPrefix(got[0], "a=") {
		t.Error(got)
	}
	must(t, claimtest.WriteText(l.options.Kubelet, "{"))
	if got := k.prepareClaims(newClaim("c-3", "other", deviceResult("a", vf2))); !strings.Contains(got[0],
		"record of the claim with UID c-9") {
		t.Error(got)
	}
	must(t, os.Remove(filepath.Join(l.options.Claims, "c-9")))
	if got := k.prepareClaims(lost); !strings.HasPrefix(got[0], "a=") {
		t.Error(got)
	}
}

// TestAdminAccess: a claim with administrative access gets a device of another claim, but no device files. The device keeps its driver
// and its owner.
func TestAdminAccess(t *testing.T) {
	l := newDRALab(t)
	pcitest.Kernel{}.Start(t, l.sysfs)
	l.updateInventory(pool.Resource{Driver: "vfio-pci"}, nil)
	l.runDriver()
	k := l.register(false)
	watch, own := newClaim("c-0", "watch", adminResult("all", vf0), adminResult("all", vf1)), newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(watch, own)
	if got := k.prepareClaims(watch); got[0] != "all=node-a/0000-11-02-0 podlace.io/vf=c-0-all,sriov.podlace.io/metadata=c-0_all; all=node-a/0000-11-02-1 " {
		t.Error(got)
	}
	if got := l.driverOf(vf0) + l.driverOf(vf1); got != "iavfiavf" {
		t.Errorf("drivers %s", got)
	}
	if got := k.prepareClaims(own); !strings.HasPrefix(got[0], "a=") {
		t.Fatal(got)
	}
	k.prepareClaims(watch)
	data, err := os.ReadFile(filepath.Join(l.options.CDI, cdiFile("c-0")))
	if text := string(data); err != nil || !strings.Contains(text, "PCIDEVICE_EXAMPLE_COM_FAST=0000:11:02.0,0000:11:02.1") ||
		strings.Contains(text, "deviceNodes") {
		t.Errorf("%s, %v", data, err)
	}
	if got := k.unprepareClaims("c-0"); got[0] != "" || l.driverOf(vf0) != "vfio-pci" {
		t.Errorf("%v, driver %s", got, l.driverOf(vf0))
	}
}

// TestDriverBack: Prepare binds the claim's driver, and the CDI specification has the device files. When the claim ends, the former
// driver is bound again, also if the daemon was killed during Prepare or Unprepare, or if a new instance finds the claim's driver
// already bound.
func TestDriverBack(t *testing.T) {
	l := newDRALab(t)
	pcitest.Set(t, l.sysfs, vf0, "net/ens0f0v0/address", "02:00:00:00:00:07")
	pcitest.Kernel{}.Start(t, l.sysfs)
	p := l.planFor(t, "c-1", vf0)
	p.devices[0].driver, p.devices[0].restores = "vfio-pci", true
	must(t, l.reserve(t.Context(), &p, nil), l.writeCDI(p))
	before, err := claim.Read(l.options.Claims, "c-1")
	want := []claim.Binding{{ID: vf0, Driver: "vfio-pci", Former: "iavf", MAC: "02:00:00:00:00:07"}}
	if !cmp.Equal(before.Bound, want) || err != nil {
		t.Errorf("%+v, %v", before.Bound, err)
	}
	data, err := os.ReadFile(filepath.Join(l.options.CDI, cdiFile("c-1")))
	a, _ := pci.ParseAddress(vf0)
	now, _ := pci.Inspect(l.sysfs, a)
	group := fmt.Sprintf(`"/dev/vfio/%d"`, now.IOMMUGroup)
	if !strings.Contains(string(data), `"/dev/vfio/vfio"`) || !strings.Contains(string(data), group) || err != nil || now.IOMMUGroup < 0 || l.driverOf(vf0) != "vfio-pci" {
		t.Errorf("%s, %v, driver %s", data, err, l.driverOf(vf0))
	}
	again := l.planFor(t, "c-1", vf0) // the next instance finds the driver bound
	again.devices[0].driver, again.devices[0].restores = "vfio-pci", true
	must(t, l.reserve(t.Context(), &again, &before), l.unprepare(t.Context(), "c-1"))
	if l.driverOf(vf0) != "iavf" || l.fileNames(l.options.Claims) != "" {
		t.Errorf("driver %s, records %s", l.driverOf(vf0), l.fileNames(l.options.Claims))
	}
}

func (l *draLab) planFor(t testing.TB, uid, address string) claimPlan {
	p, err := l.planClaim(newClaim(uid, uid, deviceResult("a", address)), nil)
	must(t, err)
	return p
}

// TestVanishedVF: a claim can be unprepared even if its VF no longer exists.
func TestVanishedVF(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	k := l.register(false)
	c := newClaim("c-1", "web", deviceResult("a", vf3))
	l.addClaims(c)
	k.prepareClaims(c)
	r, err := claim.Read(l.options.Claims, "c-1")
	r.Bound = []claim.Binding{{ID: vf3, Driver: "iavf", Former: "vfio-pci"}}
	must(t, err, claim.Write(l.options.Claims, r))
	pcitest.Remove(t, l.sysfs, vf3)
	l.Update(Inventory{Snapshot: &pci.Snapshot{}})
	if got := k.unprepareClaims("c-1"); got[0] != "" || l.fileNames(l.options.Claims) != "" {
		t.Errorf("%v, %s", got, l.fileNames(l.options.Claims))
	}
}

// TestNoWait: a slow bind for one claim does not delay others, and a second Prepare for it does not bind again.
func TestNoWait(t *testing.T) {
	l := newDRALab(t)
	pcitest.Kernel{Stuck: []string{"iavf"}}.Start(t, l.sysfs)
	l.runDriver()
	k := l.register(false)
	slow := l.planFor(t, "c-1", vf0)
	slow.devices[0].driver, slow.devices[0].restores = "vfio-pci", true
	done := make(chan error)
	go func() { done <- l.reserve(t.Context(), &slow, nil) }()
	l.await("the record of the slow claim", func() bool { return l.fileNames(l.options.Claims) == "c-1" })
	c := newClaim("c-2", "fast", deviceResult("a", vf1))
	l.addClaims(c)
	if got := k.prepareClaims(c); !strings.HasPrefix(got[0], "a=") {
		t.Error(got)
	}
	select {
	case err := <-done:
		t.Errorf("the slow one has ended: %v", err)
	case <-time.After(10 * time.Millisecond):
	}
	<-done
}

// TestConfigChanges removes "api": "dra" from a resource. Its prepared claims stay prepared, also for a new sandbox of the pod.
func TestConfigChanges(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	k := l.register(false)
	c := newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(c)
	first := k.prepareClaims(c)
	l.Update(Inventory{Snapshot: &pci.Snapshot{}})
	if diff := cmp.Diff(first, k.prepareClaims(c)); diff != "" {
		t.Error(diff)
	}
	if got := k.unprepareClaims("c-1"); got[0] != "" {
		t.Error(got)
	}
}

// TestPrepareWholePF: Prepare refuses a whole PF while a claim has one of its VFs or if VFs were created after the last scan, and the
// VFs while a claim has the PF.
func TestPrepareWholePF(t *testing.T) {
	const pf = "0000:11:00.0"
	l := newDRALab(t)
	pcitest.Kernel{VFDriver: "iavf"}.Start(t, l.sysfs)
	look := func() {
		i := l.latestInventory()
		s, err := pci.Scan(l.sysfs)
		must(t, err)
		a, err := pci.ParseAddress(pf)
		must(t, err)
		device, _ := s.Device(a)
		i.Snapshot, i.Pools = s, append(slices.Clone(i.Pools[:1]),
			pool.Pool{Name: "example.com/whole", Resource: &pool.Resource{API: pool.DRA}, Devices: []pool.Device{{Device: device, Whole: 4}}})
		l.Update(i)
	}
	look()
	whole, one := newClaim("c-1", "whole", deviceResult("a", pf)), newClaim("c-2", "one", deviceResult("a", vf2))
	prepare := func(c *resourceapi.ResourceClaim, says string) {
		t.Helper()
		if _, err := l.prepare(t.Context(), c); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want %q", err, says)
		}
	}
	prepare(one, "")
	prepare(whole, "VF 0000:11:02.2 still belongs to claim shop/one (uid c-2)")
	must(t, l.unprepare(t.Context(), "c-2"))
	prepare(whole, "")
	if data, err := os.ReadFile(filepath.Join(l.sysfs, "bus/pci/devices", pf, "sriov_numvfs")); err != nil || strings.TrimSpace(string(data)) != "0" {
		t.Errorf("%s VFs, %v", data, err)
	}
	prepare(whole, "")
	look()                                                                                                   // this scan finds no VF
	must(t, os.WriteFile(filepath.Join(l.sysfs, "bus/pci/devices", pf, "sriov_numvfs"), []byte("4"), 0o644)) // another program creates VFs
	l.await("the VFs", func() bool { _, err := os.Stat(filepath.Join(l.sysfs, "bus/pci/devices", vf2)); return err == nil })
	prepare(one, "VF 0000:11:02.2: its PF 0000:11:00.0 still belongs to claim shop/whole (uid c-1)")
	must(t, l.unprepare(t.Context(), "c-1"))
	prepare(whole, "PF 0000:11:00.0 has 4 VFs, and the last scan found 0: Prepare must be repeated after the next scan")
	must(t, l.unprepare(t.Context(), "c-1"))
	prepare(one, "")
}

// BenchmarkPrepare measures Prepare with real files on a node with 200 claims. In this benchmark, Prepare binds no driver.
func BenchmarkPrepare(b *testing.B) {
	dir, err := os.MkdirTemp("/var/tmp", "dra")
	must(b, err)
	defer os.RemoveAll(dir)
	l := newDRALab(b, func(o *Options) { o.Claims, o.CDI = filepath.Join(dir, "claims"), filepath.Join(dir, "cdi") })
	for i := range 200 {
		p := l.planFor(b, fmt.Sprint("held-", i), vf1)
		p.record.Devices[0].ID = fmt.Sprintf("0000:99:%02x.%d", i/8, i%8)
		must(b, claim.Write(l.options.Claims, p.record))
	}
	var took []time.Duration
	for b.Loop() {
		began := time.Now()
		_, err := l.prepare(b.Context(), newClaim("c-1", "web", deviceResult("a", vf0)))
		took = append(took, time.Since(began))
		b.StopTimer()
		must(b, err, l.unprepare(b.Context(), "c-1"))
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
}

// TestBindHangs: if a bind times out, the VF has a fault and is not bound again for five minutes.
func TestBindHangs(t *testing.T) {
	l := newDRALab(t)
	l.setFault(vf1, "no carrier")
	a, err := pci.ParseAddress(vf0)
	must(t, err)
	before := l.latestInventory()
	l.recordBind(a, fmt.Errorf("bind %s: %w", vf0, context.DeadlineExceeded))
	i := l.latestInventory()
	if diff := cmp.Diff(map[string]Fault{vf0: {bindTimeout, "bind 0000:11:02.0: context deadline exceeded"}, vf1: {LinkDown, "no carrier"}},
		i.Faults); diff != "" || len(before.Faults) != 1 {
		t.Error(diff)
	}
	p := l.planFor(t, "c-1", vf0)
	p.devices[0].driver = "vfio-pci"
	if err := l.reserve(t.Context(), &p, nil); err == nil || !strings.Contains(err.Error(), "retrying after 5m0s") {
		t.Errorf("got %v", err)
	}
	if left := l.fileNames(l.options.Claims); left != "" {
		t.Errorf("records: %s", left)
	}
	l.bindFailures[a] = bindFailure{time.Now().Add(-retryBind), err}
	if i := l.latestInventory(); len(i.Faults) != 1 {
		t.Errorf("%v", i.Faults)
	}
}
