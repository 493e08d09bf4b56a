// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci/pcitest"
	"github.com/podlace/podlace/pkg/pool"
)

// TestForbidden, TestAbsent: a missing permission, API, Node or server is logged once, with what is missing. Publishing resumes after the
// repair.
func TestForbidden(t *testing.T) {
	t.Parallel()
	for verb, says := range map[string]string{"node": "get node", "list": "list resourceslices.resource.k8s.io",
		"watch": "watch resourceslices.resource.k8s.io", "create": "create resourceslices.resource.k8s.io"} {
		t.Run(verb, func(t *testing.T) {
			b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, func(f *fakeAPI) { f.refuse[verb] = http.StatusForbidden })
			b.await("a line", func() bool { return b.logged(`request="`+says) > 0 })
			b.await("more tries", func() bool { return b.asked(verb) > 2 || verb == "node" || verb == "list" })
			if b.metric("up") != 0 || b.logged("level=WARN") != 1 || b.logged("grant the verb") != 1 {
				t.Errorf("up %v\n%s", b.metric("up"), b.log)
			}
			if verb == "node" || verb == "list" {
				return // the next attempt comes after a minute
			}
			b.set(func() { delete(b.refuse, verb) })
			b.await("up", func() bool { return b.metric("up") == 1 && b.complete(1, 2, 0) })
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
				b.await("slices", func() bool { return b.complete(1, 2, 0) })
				return
			}
			b.await("a line", func() bool { return b.logged(c.says) > 0 })
			time.Sleep(3 * firstRetry)
			if b.metric("up") != 0 || b.logged("level=WARN") != 1 {
				t.Errorf("up %v\n%s", b.metric("up"), b.log)
			}
			start := time.Now()
			b.driver.Update(b.machine.Inventory)
			if b.stop(); time.Since(start) > within {
				t.Error("Update or the end waits for the API server")
			}
		})
	}
}

// TestRefused: refused slices are logged once, with the invalid field. The former slices remain until the devices change.
func TestRefused(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.complete(2, 4, 0) })
	b.quiet()
	bad := b.machine.Pools[0].Devices[3]
	b.set(func() { b.invalid = DeviceName(bad.Address) }) // refused from now on
	former := b.stored()
	i := b.machine.Inventory
	i.Faults = map[string]Fault{bad.Address.String(): {LinkDown, "x"}}
	b.driver.Update(i)
	b.await("a line", func() bool { return b.logged("refuses the ResourceSlices") > 0 })
	writes := b.quiet()
	b.driver.Update(i)
	if n := b.quiet() - writes; n != 0 {
		t.Errorf("%d writes of what is refused", n)
	}
	if b.logged("level=ERROR") != 1 || b.logged("spec.devices[1].name") == 0 || b.metric("slices_refused") != 1 || b.metric("up") != 0 {
		t.Errorf("refused %v, up %v\n%s", b.metric("slices_refused"), b.metric("up"), b.log)
	}
	if diff := cmp.Diff(specs(former), specs(b.stored())); diff != "" || !b.complete(2, 4, 0) {
		t.Error(diff)
	}
	b.set(func() { b.invalid = "" })
	b.fault(0, LinkDown)
	b.await("others", func() bool { return b.complete(2, 4, 2) && b.metric("up") == 1 && b.metric("slices_refused") == 0 })
}

// TestRefusedAmongOthers: if several slices change and one is refused, the pool remains complete in its former state.
func TestRefusedAmongOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.complete(2, 4, 0) })
	b.quiet()
	former := b.stored()
	b.set(func() { b.invalid, b.onlyTainted = DeviceName(b.machine.Pools[0].Devices[3].Address), true })
	i := b.machine.Inventory
	i.Faults = map[string]Fault{}
	for _, dev := range i.Pools[0].Devices {
		i.Faults[dev.Address.String()] = Fault{LinkDown, "x"}
	}
	start := time.Now()
	b.driver.Update(i)
	b.await("a line", func() bool { return b.logged("refuses the ResourceSlices") > 0 })
	b.await("the former pool", func() bool { return b.complete(2, 4, 0) })
	t.Logf("the former pool is back after %s", time.Since(start))
	if n := b.quiet(); n > 8 || !b.complete(2, 4, 0) || !cmp.Equal(specs(former), specs(b.stored())) {
		t.Errorf("%d writes, %v", n, b.stored())
	}
}

// TestTaintsDropped: if the API server drops taints, free VFs with faults leave the slice, and return when the link is up. Claimed VFs
// stay. It is logged once.
func TestTaintsDropped(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, func(f *fakeAPI) { f.noTaints = true })
	record := prepared(b.machine.Pools[0].Devices[1].Address.String())
	c := record.Devices[0].Claim
	c.Namespace, c.Name, c.Request, c.Pool, c.Device = "shop", "web", "nic", "node-a", "x"
	if err := claim.Write(b.driver.options.Claims, record); err != nil {
		t.Fatal(err)
	}
	b.await("2 slices", func() bool { return b.complete(2, 4, 0) })
	for range 2 {
		b.fault(0, LinkDown)
		b.await("one VF less", func() bool { return b.complete(2, 3, 0) })
		if n := b.quiet(); n > 12 {
			t.Errorf("%d writes", n)
		}
		b.fault(0, "")
		b.await("all VFs", func() bool { return b.complete(2, 4, 0) })
	}
	if b.logged("DRADeviceTaints") != 1 || b.metric("up") != 1 {
		t.Error(b.log)
	}
}

// TestWholePF: if the API server drops counters, or refuses them in separate slices, PFs offered as a whole are not published.
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
				b.await("counters", func() bool { return b.complete(2, 3, 0) })
				return
			}
			b.await("no PF", func() bool { return b.complete(1, 2, 0) && b.logged("offerWhole") == 1 })
			b.quiet()
			if b.metric("up") != 1 || !b.complete(1, 2, 0) || b.logged("offerWhole") != 1 {
				t.Error(b.log)
			}
		})
	}
}

// TestNodeReplaced checks that slices of a deleted Node object get the new object as owner.
func TestNodeReplaced(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.complete(1, 2, 0) })
	b.set(func() { b.nodes["node-a"] = "uid-2" })
	b.remove(false) // as the garbage collector does
	b.await("a slice", func() bool { return b.complete(1, 2, 0) })
	if owner := b.stored()[0].OwnerReferences[0]; owner.UID != "uid-2" {
		t.Errorf("%+v", owner)
	}
}
