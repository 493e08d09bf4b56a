// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci/pcitest"
)

// within bounds the wait for the goal of 3 seconds on a loaded machine. Only lasting failures exceed it.
const within = 20 * time.Second

// text is a log that tests can read while it is written.
type syncedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *syncedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// bench is a publisher with an API server.
type bench struct {
	testing.TB
	*fakeAPI
	driver   *Driver
	machine  desired
	registry *prometheus.Registry
	log      *syncedBuffer
	stop     func()
}

// newBench publishes a machine. prepare changes the API server first.
func newBench(t testing.TB, m pcitest.Machine, prepare func(*fakeAPI)) *bench {
	t.Helper()
	b := &bench{TB: t, fakeAPI: newFakeAPI(t), log: &syncedBuffer{}}
	b.machine, _ = machine(t, m)
	if prepare != nil {
		prepare(b.fakeAPI)
	}
	b.start()
	return b
}

// start runs a new publisher until stop or the end of the test.
func (b *bench) start() {
	b.registry = prometheus.NewRegistry()
	claims := b.TempDir()
	b.driver = New(Options{Node: "node-a", Client: b.client(), Claims: claims, Records: claim.NewCache(claims, ""), Metrics: b.registry,
		Log: slog.New(slog.NewTextHandler(b.log, nil))})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.driver.slices.publish(ctx)
	}()
	b.stop = sync.OnceFunc(func() { cancel(); <-done })
	b.Cleanup(b.stop)
	b.driver.Update(b.machine.Inventory)
}

// fault sets or clears a fault of all VFs of a PF in one update, as the daemon does.
func (b *bench) fault(pf int, kind string) {
	i := b.machine.Inventory
	i.Faults = map[string]Fault{}
	of := i.Pools[0].Devices[pf*len(i.Pools[0].Devices)/b.pfs()].PF
	for _, d := range i.Pools[0].Devices {
		if d.PF == of && kind != "" {
			i.Faults[d.Address.String()] = Fault{kind, "x"}
		}
	}
	b.driver.Update(i)
}

func (b *bench) pfs() (n int) {
	for _, d := range b.machine.Snapshot.Devices {
		if !d.IsVF() {
			n++
		}
	}
	return n
}

// complete reports whether the slices form one generation of the pool, with these numbers of devices and taints.
func (b *bench) complete(count, devices, taints int) bool {
	all := b.stored()
	for _, s := range all {
		if s.Spec.Pool.ResourceSliceCount != int64(count) || s.Spec.Pool.Generation != all[0].Spec.Pool.Generation ||
			s.Spec.Pool.Name != "node-a" || *s.Spec.NodeName != "node-a" {
			return false
		}
		for _, d := range s.Spec.Devices {
			devices--
			taints -= len(d.Taints)
		}
	}
	return len(all) == count && devices == 0 && taints == 0
}

func (b *bench) await(what string, so func() bool) {
	b.Helper()
	await(b.TB, what, so)
}

// quiet waits until no more writes happen.
func (b *bench) quiet() (writes int) {
	for writes = -1; writes != b.writes(); time.Sleep(3 * syncDelay) {
		writes = b.writes()
	}
	return writes
}

// metric returns the value of a publisher's metric, summed over its labels.
func (b *bench) metric(name string) float64 {
	b.Helper()
	return gathered(b, b.registry, "podlace_sriov_dra_"+name)
}

// gathered returns the value of a metric, summed over its labels.
func gathered(t testing.TB, from prometheus.Gatherer, name string) (sum float64) {
	t.Helper()
	families, err := from.Gather()
	must(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// logged returns how often a text is in the log.
func (b *bench) logged(text string) int { return strings.Count(b.log.String(), text) }

// TestPublished: the slices exist, are owned by the Node, and are not written again. A restart without a change writes nothing. The end
// deletes nothing.
func TestPublished(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 2, PFs: 2, VFs: 3}, nil)
	b.await("4 slices", func() bool { return b.complete(4, 12, 0) })
	first := b.stored()
	want := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node-a", UID: "uid-1", Controller: new(true)}}
	if diff := cmp.Diff(want, first[0].OwnerReferences); diff != "" || !strings.HasPrefix(first[0].Name, "00000-sriov.podlace.io-node-a-") {
		t.Errorf("%s: %s", first[0].Name, diff)
	}
	if n := b.quiet(); n != 4 {
		t.Errorf("%d writes", n)
	}
	if b.metric("up") != 1 || b.metric("slices") != 4 || b.metric("writes_total") != 4 || b.metric("slices_refused") != 0 {
		t.Error("metrics are wrong")
	}
	for range 2 {
		b.stop()
		b.start()
		b.await("up", func() bool { return b.metric("up") == 1 })
		b.quiet()
	}
	if diff := cmp.Diff(first, b.stored()); diff != "" || b.writes() != 4 {
		t.Errorf("%d writes: %s", b.writes(), diff)
	}
	if n := b.asked("watch"); n > 3 { // one for each start
		t.Errorf("%d watches", n)
	}
}

// TestEmpty checks that a node without VFs has an empty slice.
func TestEmpty(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1}, nil)
	b.await("an empty slice", func() bool { return b.complete(1, 0, 0) })
}

// TestOneWrite checks that a PF that goes down and up causes one write each, and that TimeAdded survives a restart.
func TestOneWrite(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 64}, nil)
	b.await("2 slices", func() bool { return b.complete(2, 128, 0) })
	before := b.quiet()
	start := time.Now()
	b.fault(1, LinkDown)
	b.await("taints", func() bool { return b.complete(2, 128, 64) })
	t.Logf("taints are stored after %s", time.Since(start))
	if n := b.quiet() - before; n != 1 {
		t.Errorf("%d writes for a link that goes down", n)
	}
	down := b.stored()
	b.stop()
	b.start()
	b.fault(1, LinkDown)
	b.quiet()
	if diff := cmp.Diff(taintsOf(down), taintsOf(b.stored())); diff != "" {
		t.Error(diff)
	}
	before = b.quiet()
	b.fault(1, "")
	b.await("no taints", func() bool { return b.complete(2, 128, 0) })
	if n := b.quiet() - before; n != 1 {
		t.Errorf("%d writes for a link that comes back", n)
	}
}

func taintsOf(all []resourceapi.ResourceSlice) map[string][]resourceapi.DeviceTaint {
	out := map[string][]resourceapi.DeviceTaint{}
	for _, s := range all {
		for _, d := range s.Spec.Devices {
			out[d.Name] = d.Taints
		}
	}
	return out
}

// TestSliceDeleted, TestSliceEdited: slices that a kubelet or a user deletes or edits are restored, also after a broken watch.
func TestSliceDeleted(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.complete(2, 4, 0) })
	b.quiet()
	for name, remove := range map[string]func(){
		"one":                  func() { b.remove(false, b.stored()[1].Name) },
		"all, as by a kubelet": func() { b.remove(false) },
		"and right after they were written": func() {
			b.remove(false)
			b.await("a slice", func() bool { return len(b.stored()) > 0 })
			b.remove(false)
		},
		"while the watch is broken": func() { b.remove(true); b.hangUp(true) },
	} {
		remove()
		start := time.Now()
		b.await("the slices are back: "+name, func() bool { return b.complete(2, 4, 0) })
		if took := time.Since(start); took > within {
			t.Errorf("%s: %s", name, took)
		} else {
			t.Logf("%s: back after %s", name, took)
		}
		b.quiet()
	}
}

// TestLostCreate checks that the daemon restores a slice that was deleted before the watch showed it. The library must not assume for long
// that it exists.
func TestLostCreate(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.complete(1, 2, 0) })
	b.quiet()
	created := b.asked("create")
	b.remove(false)
	b.set(func() { b.muted = true })
	b.await("another slice", func() bool { return b.asked("create") > created && b.complete(1, 2, 0) })
	b.remove(true)
	b.set(func() { b.muted = false })
	b.hangUp(true)
	start := time.Now()
	b.await("the slice is back", func() bool { return b.complete(1, 2, 0) })
	if took := time.Since(start); took > within {
		t.Error(took)
	} else {
		t.Logf("back after %s", took)
	}
}

func TestSliceEdited(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.complete(2, 4, 0) })
	b.quiet()
	want := b.stored()
	for name, edit := range map[string]func(*resourceapi.ResourceSlice){
		"a device less": func(s *resourceapi.ResourceSlice) { s.Spec.Devices = s.Spec.Devices[:1] },
		"an attribute":  func(s *resourceapi.ResourceSlice) { s.Spec.Devices[0].Attributes["vf"] = number(77) },
		"a taint": func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "x", Effect: "NoSchedule"}}
		},
		"the generation": func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Generation += 7 },
	} {
		b.edit(want[1].Name, edit)
		start := time.Now()
		same := func() bool {
			return b.complete(2, 4, 0) && cmp.Equal(specs(want), specs(b.stored()))
		}
		b.await("the slice is as it was: "+name, same)
		t.Logf("%s: back after %s", name, time.Since(start))
		b.quiet()
	}
}

// specs returns the devices of slices.
func specs(all []resourceapi.ResourceSlice) (out [][]resourceapi.Device) {
	for _, s := range all {
		out = append(out, s.Spec.Devices)
	}
	return out
}

// TestWatchEnds checks that an ended watch, by 410 or otherwise, is restarted, without a write or a log line.
func TestWatchEnds(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.complete(1, 2, 0) })
	before, watches := b.quiet(), b.asked("watch")
	for _, gone := range []bool{true, false} {
		b.hangUp(gone)
		b.await("another watch", func() bool { return b.asked("watch") > watches && b.watched() })
		watches = b.asked("watch")
	}
	if b.quiet() != before || b.logged("level=WARN") > 0 {
		t.Errorf("%d writes\n%s", b.writes()-before, b.log)
	}
}

// TestConflict checks that an update is repeated after another writer was faster.
func TestConflict(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.complete(1, 2, 0) })
	b.quiet()
	b.set(func() { b.refuse["update"] = http.StatusConflict })
	b.fault(0, LinkDown)
	b.await("a conflict", func() bool { return b.asked("update") > 0 })
	b.set(func() { delete(b.refuse, "update") })
	b.await("taints", func() bool { return b.complete(1, 2, 2) })
	if b.logged("level=WARN") > 0 {
		t.Error(b.log)
	}
}
