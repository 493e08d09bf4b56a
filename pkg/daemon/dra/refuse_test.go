// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

// TestForbidden and TestAbsent lack a permission, the API, the Node or the API server. The publisher logs this once, and publishes when
// nothing is missing any more.
func TestForbidden(t *testing.T) {
	t.Parallel()
	for verb, says := range map[string]string{"node": "get node", "list": "list resourceslices.resource.k8s.io",
		"watch": "watch resourceslices.resource.k8s.io", "create": "write resourceslices.resource.k8s.io"} {
		t.Run(verb, func(t *testing.T) {
			b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, func(f *fakeAPI) { f.refuse[verb] = http.StatusForbidden })
			b.await("a line", func() bool { return b.countLogged(`request="`+says) > 0 })
			b.await("more tries", func() bool { return b.countRequests(verb) > 2 || verb == "node" || verb == "list" })
			if b.metricValue("up") != 0 || b.countLogged("level=WARN") != 1 || b.countLogged("grant the verb") != 1 {
				t.Errorf("up %v\n%s", b.metricValue("up"), b.log)
			}
			b.configure(func() { delete(b.refuse, verb) })
			b.await("up", func() bool { return b.metricValue("up") == 1 && b.isComplete(1, 2, 0) })
		})
	}
}

func TestAbsent(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare func(*fakeAPI)
		says    string
	}{
		"server":   {func(f *fakeAPI) { f.server.CloseClientConnections(); f.server.Close() }, "connection refused"},
		"API":      {func(f *fakeAPI) { f.old = true }, "Kubernetes 1.34 or newer"},
		"node":     {func(f *fakeAPI) { delete(f.nodes, "node-a") }, "--node-name"},
		"answers":  {func(f *fakeAPI) { f.refuse["*"] = http.StatusInternalServerError }, "a request failed"},
		"slowness": {func(f *fakeAPI) { f.delay = 300 * time.Millisecond }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, c.prepare)
			if c.says == "" {
				b.await("slices", func() bool { return b.isComplete(1, 2, 0) })
				return
			}
			b.await("a line", func() bool { return b.countLogged(c.says) > 0 })
			time.Sleep(3 * firstRetry)
			if b.metricValue("up") != 0 || b.countLogged("level=WARN") != 1 {
				t.Errorf("up %v\n%s", b.metricValue("up"), b.log)
			}
			start := time.Now()
			b.driver.Update(b.machine.Inventory)
			if b.stop(); time.Since(start) > maxWait {
				t.Error("Update or the end waits for the API server")
			}
		})
	}
}

// TestRefused: if the API server refuses slices, one log line names the invalid field, and the former slices stay until the devices
// change.
func TestRefused(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.isComplete(2, 4, 0) })
	b.awaitQuiet()
	bad := b.machine.Pools[0].Devices[3]
	b.configure(func() { b.invalid = DeviceName(bad.Address) }) // refused from now on
	former := b.storedSlices()
	i := b.machine.Inventory
	i.Faults = map[string]Fault{bad.Address.String(): {LinkDown, "x"}}
	b.driver.Update(i)
	b.await("a line", func() bool { return b.countLogged("refuses the ResourceSlices") > 0 })
	writes := b.awaitQuiet()
	b.driver.Update(i)
	if n := b.awaitQuiet() - writes; n != 0 {
		t.Errorf("%d writes of what is refused", n)
	}
	if b.countLogged("level=ERROR") != 1 || b.countLogged("spec.devices[1].name") == 0 || b.metricValue("slices_refused") != 1 ||
		b.metricValue("up") != 0 {
		t.Errorf("refused %v, up %v\n%s", b.metricValue("slices_refused"), b.metricValue("up"), b.log)
	}
	if diff := cmp.Diff(deviceSpecs(former), deviceSpecs(b.storedSlices())); diff != "" || !b.isComplete(2, 4, 0) {
		t.Error(diff)
	}
	b.configure(func() { b.invalid = "" })
	b.setFault(0, LinkDown)
	b.await("others", func() bool {
		return b.isComplete(2, 4, 2) && b.metricValue("up") == 1 && b.metricValue("slices_refused") == 0
	})
}

// TestRefusedAmongOthers: if one of several changed slices is refused, the former ones stay and the pool stays complete.
func TestRefusedAmongOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.isComplete(2, 4, 0) })
	b.awaitQuiet()
	former := b.storedSlices()
	b.configure(func() { b.invalid, b.onlyTainted = DeviceName(b.machine.Pools[0].Devices[3].Address), true })
	i := b.machine.Inventory
	i.Faults = map[string]Fault{}
	for _, dev := range i.Pools[0].Devices {
		i.Faults[dev.Address.String()] = Fault{LinkDown, "x"}
	}
	start := time.Now()
	b.driver.Update(i)
	b.await("a line", func() bool { return b.countLogged("refuses the ResourceSlices") > 0 })
	b.await("the former pool", func() bool { return b.isComplete(2, 4, 0) })
	t.Logf("the former pool is back after %s", time.Since(start))
	if n := b.awaitQuiet(); n > 12 || !b.isComplete(2, 4, 0) || !cmp.Equal(deviceSpecs(former), deviceSpecs(b.storedSlices())) {
		t.Errorf("%d writes, %v", n, b.storedSlices())
	}
}

// TestTaintsDropped: if the API server drops taints, which is logged once, free VFs with faults leave the slice until the link is up.
// Claimed VFs stay.
func TestTaintsDropped(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, func(f *fakeAPI) { f.noTaints = true })
	record := preparedRecord(b.machine.Pools[0].Devices[1].Address.String())
	c := record.Devices[0].Claim
	c.Namespace, c.Name, c.Request, c.Pool, c.Device = "shop", "web", "nic", "node-a", "x"
	if err := claim.Write(b.driver.options.Claims, record); err != nil {
		t.Fatal(err)
	}
	b.await("2 slices", func() bool { return b.isComplete(2, 4, 0) })
	for range 2 {
		b.setFault(0, LinkDown)
		b.await("one VF less", func() bool { return b.isComplete(2, 3, 0) })
		if n := b.awaitQuiet(); n > 12 {
			t.Errorf("%d writes", n)
		}
		b.setFault(0, "")
		b.await("all VFs", func() bool { return b.isComplete(2, 4, 0) })
	}
	if b.countLogged("DRADeviceTaints") != 1 || b.metricValue("up") != 1 {
		t.Error(b.log)
	}
}

// TestWholePF: if the API server drops counters, or refuses them in separate slices, PFs that are offered as a whole are not published.
func TestWholePF(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(*fakeAPI){"stored": func(*fakeAPI) {}, "dropped": func(f *fakeAPI) { f.noCounters = true },
		"refused": func(f *fakeAPI) { f.refuseMixed = true }} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, prepare)
			i := b.machine.Inventory
			pf := pool.Device{Device: mustPF(t, b.machine, i.Pools[0].Devices[0]), Whole: 2}
			i.Pools = append([]pool.Pool{{Name: "example.com/whole", Resource: i.Pools[0].Resource, Devices: []pool.Device{pf}}}, i.Pools...)
			b.driver.Update(i)
			if name == "stored" {
				b.await("counters", func() bool { return b.isComplete(2, 3, 0) })
				return
			}
			b.await("no PF", func() bool { return b.isComplete(1, 2, 0) && b.countLogged("offerWhole") == 1 })
			b.awaitQuiet()
			if b.metricValue("up") != 1 || !b.isComplete(1, 2, 0) || b.countLogged("offerWhole") != 1 {
				t.Error(b.log)
			}
		})
	}
}

// TestNodeReplaced: a new Node object replaces a deleted one. The new Node object becomes the owner of the slices.
func TestNodeReplaced(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.isComplete(1, 2, 0) })
	b.configure(func() { b.nodes["node-a"] = "uid-2" })
	b.removeSlices(false) // as the garbage collector does
	b.await("a slice", func() bool { return b.isComplete(1, 2, 0) })
	if owner := b.storedSlices()[0].OwnerReferences[0]; owner.UID != "uid-2" {
		t.Errorf("%+v", owner)
	}
}
