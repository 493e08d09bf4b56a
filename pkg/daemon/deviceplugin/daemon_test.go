// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/poddevices"
)

// TestDaemon checks that each resource offers its devices with their NUMA nodes, becomes ready, and is in the metrics and answers.
func TestDaemon(t *testing.T) {
	l := newLab(t, twoPFs(t), twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	p := l.awaitDevices("example.com/two", vf10, vf11)
	if nodes := p.devices[vf10].GetTopology().GetNodes(); len(nodes) != 1 || nodes[0].GetID() != 1 {
		t.Errorf("NUMA nodes %v", nodes)
	}
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/two", vf11)
	l.hup()
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+vf11+`",container="app",namespace="shop",pod="web-0",resource="example.com/two"} 1`,
		`podlace_sriov_devices{numa="1",resource="example.com/two",state="free"} 1`,
		`podlace_sriov_kubelet_registrations_total{resource="example.com/one"} 1`,
		`podlace_sriov_vf_info{bdf="`+vf00+`",driver="iavf",numa="0",pf="`+pf0+`",resource="example.com/one",vf="0"} 1`)
	l.await("/readyz", "ok")
	l.await("/healthz", "ok")
	for _, off := range []bool{false, true} {
		l.kubelet.mu.Lock()
		l.kubelet.getOff, l.kubelet.busy = off, 3
		l.kubelet.mu.Unlock()
		got, err := poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{Namespace: "shop", Pod: "web-0"})
		want := []poddevices.Device{{Namespace: "shop", Pod: "web-0", Container: "app", Resource: "example.com/two", ID: vf11,
			CPUs: []int64{16, 17}}}
		if diff := cmp.Diff(poddevices.Answer{Devices: want}, got); diff != "" || err != nil {
			t.Errorf("%v\n%s", err, diff)
		}
	}
	l.kubelet.kill()
	l.await("/readyz", "the kubelet does not watch example.com/one, example.com/two")
}

// TestAnswerAll checks that the answer about all pods has the faults of devices and those that another device plugin assigned, but no
// resources of other device plugins.
func TestAnswerAll(t *testing.T) {
	sysfs := twoPFs(t)
	pcitest.Set(t, sysfs, vf01, "driver", "")
	l := newLab(t, sysfs, twoPools)
	l.awaitDevices("example.com/one", vf00, vf01+"!")
	l.kubelet.assignDevices("shop", "web-0", "app", "another.org/nic", vf11)
	l.kubelet.assignDevices("shop", "web-1", "app", "example.com/one", vf00)
	l.kubelet.assignDevices("shop", "web-2", "app", "another.org/gpu", "gpu-0")
	got, err := poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{})
	want := poddevices.Answer{Faults: map[string]string{vf01: "driver: leads to an unexpected folder"}, Devices: []poddevices.Device{
		{Namespace: "shop", Pod: "web-0", Container: "app", Resource: "another.org/nic", ID: vf11, CPUs: []int64{16, 17}},
		{Namespace: "shop", Pod: "web-1", Container: "app", Resource: "example.com/one", ID: vf00, CPUs: []int64{16, 17}}}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}

// TestVanished checks that a missing device is removed at once, or stays listed until its pod ends, and that no other pod gets it.
func TestVanished(t *testing.T) {
	sysfs := twoPFs(t)
	l := newLab(t, sysfs, twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/one", vf00)
	l.hup()
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+vf00)
	pcitest.Remove(t, sysfs, pf0)
	p := l.awaitDevices("example.com/one", vf00+"!")
	if nodes := p.devices[vf00].GetTopology().GetNodes(); len(nodes) != 1 || nodes[0].GetID() != 0 {
		t.Errorf("NUMA nodes of a device that has gone: %v", nodes)
	}
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+vf00,
		`podlace_sriov_devices{numa="-1",resource="example.com/one",state="unhealthy"} 1`)
	if _, err := p.client.Allocate(t.Context(), allocating(vf00)); err == nil ||
		!strings.Contains(err.Error(), `device "`+vf00+`" is not in this resource`) {
		t.Errorf("got %v", err)
	}
	if _, err := p.client.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: []string{vf00}}); err == nil {
		t.Error("a container starts without its device")
	}
	l.kubelet.release()
	l.hup()
	l.awaitDevices("example.com/one")
}

// TestMoved checks that a pod keeps its VF, which no other pod gets, when a new configuration assigns it to another resource.
func TestMoved(t *testing.T) {
	l := newLab(t, twoPFs(t), twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/one", vf00)
	l.hup()
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+vf00)
	l.configure(`{"resourceList": [{"resourceName": "all"}]}`)
	l.awaitDevices("example.com/all", vf01, vf10, vf11)
	l.awaitDevices("example.com/one", vf00+"!")
	l.kubelet.release()
	l.hup()
	l.awaitDevices("example.com/all", vf00, vf01, vf10, vf11)
	l.awaitLog("the resource is no longer served", "example.com/one")
}

// TestJustHandedOut checks that a device counts as in use, so that its driver stays, even before the kubelet lists it.
func TestJustHandedOut(t *testing.T) {
	sysfs := twoPFs(t)
	pcitest.Kernel{}.Start(t, sysfs)
	l := newLab(t, sysfs, twoPools)
	p := l.awaitDevices("example.com/one", vf00, vf01)
	if _, err := p.client.Allocate(t.Context(), allocating(vf00)); err != nil {
		t.Fatal(err)
	}
	l.configure(`{"resourceList": [{"resourceName": "one", "driver": "vfio-pci", "selectors": {"pfNames": ["ens0f0"]}}]}`)
	l.awaitLog("could not configure a device as requested", vf00, "(being admitted)")
	l.awaitLog("changed the driver of a device", vf01, "vfio-pci")
	l.await("/metrics", `podlace_sriov_allocations_total{aligned="true",numa="0",policy="numa-best-fit",resource="example.com/one",same_pf="true"} 1`)
}

// TestGate checks that a device is not allocated while the daemon changes it, for example its driver.
func TestGate(t *testing.T) {
	p := vfPool(1)
	id := p.Devices[0].Address.String()
	g := newGate("", "/nonexistent", "")
	e := newEndpoint(fast, offering(p), quiet(), newCounters(), g)
	ask := func() error { _, err := e.Allocate(t.Context(), allocating(id)); return err }
	if err := g.runChange([]string{id}, func() error { return errInUse },
		func() error { t.Error("changed in use"); return nil }); !errors.Is(err,
		errInUse) {
		t.Errorf("got %v", err)
	}
	if err := ask(); err != nil {
		t.Error(err)
	}
	if err := g.runChange([]string{id}, func() error { return nil }, ask); err == nil ||
		!strings.Contains(err.Error(), "gets another driver") {
		t.Errorf("got %v", err)
	}
	if err := ask(); err != nil {
		t.Error(err)
	}
}

// TestHeldElsewhere checks that a VF that a pod has through another device plugin is never offered, not even right after the start.
func TestHeldElsewhere(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-0", "app", "intel.com/sriov", vf00)
	l.start()
	l.awaitDevices("example.com/two", vf10, vf11)
	p := l.awaitDevices("example.com/one", vf01)
	if p.lists != 1 {
		t.Errorf("%d lists", p.lists)
	}
}

// TestForgetfulKubelet has a kubelet that has just started and lists no pods yet. The daemon uses the kubelet's checkpoint and its own
// recent allocations, so that no second pod gets a device.
func TestForgetfulKubelet(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	write(t, filepath.Join(l.kubelet.dir, checkpointName), `{"Data":{"PodDeviceEntries":[{"PodUID":"u-1","ContainerName":"app","ResourceName":"example.com/one",
		"DeviceIDs":{"0":["`+vf00+`"]},"AllocResp":"Cg=="}],"RegisteredDevices":{}},"Checksum":1}`)
	l.kubelet.start()
	l.start()
	p := l.awaitDevices("example.com/one", vf00, vf01)
	if _, err := p.client.Allocate(t.Context(), allocating(vf01)); err != nil {
		t.Fatal(err)
	}
	l.configure(`{"resourceList": [{"resourceName": "all"}]}`)
	l.awaitDevices("example.com/all", vf10, vf11)
	p = l.awaitDevices("example.com/one", vf00+"!", vf01+"!")
	if _, err := p.client.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: []string{vf00}}); err != nil {
		t.Errorf("a container cannot restart: %v", err)
	}
}

// TestNoPCIBus: on a machine without a PCI bus, the daemon runs, its resources are empty, and it says why once.
func TestNoPCIBus(t *testing.T) {
	sysfs := t.TempDir()
	if err := os.Mkdir(filepath.Join(sysfs, "bus"), 0o755); err != nil {
		t.Fatal(err)
	}
	l := newLab(t, sysfs, twoPools)
	l.awaitDevices("example.com/one")
	l.awaitDevices("example.com/two")
	l.hup()
	l.await("/readyz", "ok")
	if got := strings.Count(l.log.String(), "this node has no PCI bus"); got != 1 {
		t.Errorf("said %d times:\n%s", got, l.log.String())
	}
}

// TestHealth checks that a fault and its end are reported after a delay each.
func TestHealth(t *testing.T) {
	sysfs := twoPFs(t)
	l := newLab(t, sysfs, twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	pcitest.Set(t, sysfs, "0000:11:00.0", "net/ens0f0/carrier", "0")
	l.awaitDevices("example.com/one", vf00+"!", vf01+"!")
	pcitest.Set(t, sysfs, "0000:11:00.0", "net/ens0f0/carrier", "1")
	l.awaitDevices("example.com/one", vf00, vf01)
}

// TestFaultsAtStart: faults that exist before the daemon are logged, counted and listed. A PF with two ports is judged by the named one.
func TestFaultsAtStart(t *testing.T) {
	sysfs := twoPFs(t)
	pcitest.Set(t, sysfs, pf1, "net/ens1f0/carrier", "0")
	port := filepath.Join(pcitest.Folder(t, sysfs, pf0), "net/ens0f1")
	if err := os.MkdirAll(port, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(port, "carrier"), "0")
	write(t, filepath.Join(port, "type"), "1")
	l := newLab(t, sysfs, `{"resourceList": [
  {"resourceName": "first", "selectors": {"pfNames": ["ens0f0#0"]}},
  {"resourceName": "second", "selectors": {"pfNames": ["ens0f1#1"]}},
  {"resourceName": "inside", "selectors": {"pfNames": ["ens1f0#0"]}, "linkDown": "off"},
  {"resourceName": "claimed", "selectors": {"pfNames": ["ens1f0#1"]}, "api": "dra"}]}`)
	l.awaitDevices("example.com/first", vf00)
	l.awaitDevices("example.com/second", vf01+"!")
	l.awaitDevices("example.com/inside", vf10)
	l.awaitLog("devices are unhealthy", "example.com/second", "the link of ens0f1 is down", vf01)
	l.awaitLog("devices are unhealthy", "example.com/claimed", "the link of ens1f0 is down", vf11)
	l.await("/metrics", `podlace_sriov_devices{numa="0",resource="example.com/second",state="unhealthy"} 1`,
		`podlace_sriov_devices{numa="1",resource="example.com/claimed",state="unhealthy"} 1`)
	answer, err := poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{})
	if err != nil || len(answer.Faults) != 2 {
		t.Errorf("got %v, %v", answer.Faults, err)
	}
	if n := strings.Count(l.log.String(), "devices are unhealthy"); n != 2 {
		t.Errorf("logged %d times", n)
	}
}

// TestReload checks that an invalid configuration is logged and the current one kept until a valid one follows.
func TestReload(t *testing.T) {
	l := newLab(t, twoPFs(t), twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	l.configure(`{"resourceList": [{"resourceName": "one", "selectors": {"pfName": ["ens0f0"]}}]}`)
	l.awaitLog("the current one remains in use", "config.json:1", "pfName")
	l.configure(`{"resourceList": [{"resourceName": "one", "selectors": {"pfNames": ["ens0f0#1", "ens9f0"]}}]}`)
	l.awaitDevices("example.com/one", vf01)
	l.awaitLog("the configuration does not fit this node", "ens9f0")
	l.awaitLog("the resource is no longer served", "example.com/two")
	if n := strings.Count(l.log.String(), "remains in use"); n != 1 {
		t.Errorf("said %d times", n)
	}
}

// TestRefusedCards: what the plugin sriov refuses is offered, for other plugins, and logged at the start and when it changes.
func TestRefusedCards(t *testing.T) {
	sysfs := twoPFs(t)
	pcitest.Set(t, sysfs, pf0, "net/eth7/phys_port_name", "pf0vf0")
	l := newLab(t, sysfs, twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	l.awaitLog("the plugin sriov refuses 2 devices, first "+vf00, "devlink dev eswitch set pci/"+pf0+" mode legacy")
	if n := strings.Count(l.log.String(), "the plugin sriov refuses"); n != 1 {
		t.Errorf("logged %d times", n)
	}
	at := filepath.Join(sysfs, "module/ib_core/parameters")
	if err := errors.Join(os.MkdirAll(at, 0o755), os.WriteFile(filepath.Join(at, "netns_mode"), []byte("N\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	l.configure(`{"resourceList": [{"resourceName": "one", "selectors": [{"pfNames": ["ens0f0"]}, {"isRdma": true}]}]}`)
	l.awaitLog("isRdma: pods cannot use the RDMA devices")
}

// TestBadStart checks that the daemon does not start with an invalid configuration and leaves no files.
func TestBadStart(t *testing.T) {
	l := prepareLab(t, twoPFs(t), `{"resourceList": [{"resourceName": "a b"}]}`)
	err := runDaemon(t.Context(), l.daemonOptions, nil, quiet())
	if err == nil || !strings.Contains(err.Error(), "config.json:1") || !strings.Contains(err.Error(), "resourceName") {
		t.Errorf("got %v", err)
	}
	for _, path := range []string{l.Socket, l.CDIDir, l.InfoDir} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is there", path)
		}
	}
}

// TestPluginRestarts checks that a restarted daemon offers its resources again, with and without devices in pods.
func TestPluginRestarts(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/one", vf00)
	for range 20 {
		stop := l.start()
		p := l.awaitDevices("example.com/one", vf00, vf01)
		if _, err := p.client.Allocate(t.Context(), allocating(vf00, vf01)); err != nil {
			t.Fatal(err)
		}
		stop()
		l.kubelet.await("example.com/one", "ended", func(p *registeredPlugin) bool { return p.ended })
		if left, _ := filepath.Glob(filepath.Join(l.kubelet.dir, "*")); len(left) != 1 {
			t.Fatalf("left %q", left)
		}
	}
}

// TestDriver checks that free devices get the configured driver, and those of pods keep theirs.
func TestDriver(t *testing.T) {
	sysfs := twoPFs(t)
	l := prepareLab(t, sysfs, `{"resourceList": [{"resourceName": "dpdk", "driver": "vfio-pci", "selectors": {"pfNames": ["ens0f0"]}}]}`)
	pcitest.Kernel{}.Start(t, sysfs)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/dpdk", vf01)
	l.start()
	l.awaitLog("could not configure a device as requested", vf01, "belongs to pod shop/web-0")
	p := l.awaitDevices("example.com/dpdk", vf00, vf01+"!")
	answer, err := p.client.Allocate(t.Context(), allocating(vf00))
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, d := range answer.GetContainerResponses()[0].GetDevices() {
		paths = append(paths, d.GetHostPath())
	}
	if len(paths) != 2 || paths[1] != "/dev/vfio/vfio" || !strings.HasPrefix(paths[0], "/dev/vfio/") {
		t.Errorf("device files %q", paths)
	}
}

// TestNumVFs checks that a PF gets the configured number of VFs, but not while a pod has one of them.
func TestNumVFs(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 4})
	config := func(n string) string {
		return `{"pfs": [{"pfName": "ens0f0", "numVfs": ` + n + `}], "resourceList": [{"resourceName": "all"}]}`
	}
	l := prepareLab(t, sysfs, config("2"))
	pcitest.Kernel{}.Start(t, sysfs)
	l.kubelet.start()
	l.start()
	two := func() { // new VFs have no driver here
		l.kubelet.await("example.com/all", "two VFs",
			func(p *registeredPlugin) bool {
				return len(p.devices) == 2 && p.devices[vf00] != nil && p.devices[vf01] != nil
			})
	}
	two()
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/all", vf01)
	l.hup()
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+vf01)
	l.configure(config("3"))
	l.awaitLog("could not configure a device as requested", "cannot change the number of VFs from 2 to 3", "belongs to pod shop/web-0")
	two()
}
