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

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
)

// maxWait limits the wait for a condition. It is enough for a loaded machine; an idle one needs at most 3 seconds.
const maxWait = 20 * time.Second

// syncedBuffer is a log that a test can read while the publisher writes to it.
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

// publisherLab is a publisher with a fake API server.
type publisherLab struct {
	testing.TB
	*fakeAPI
	driver   *Driver
	machine  desiredState
	registry *prometheus.Registry
	log      *syncedBuffer
	stop     func()
}

// newBench starts a publisher for the devices of a machine, after prepare has changed the behaviour of the API server.
func newBench(t testing.TB, m pcitest.Machine, prepare func(*fakeAPI)) *publisherLab {
	t.Helper()
	b := &publisherLab{TB: t, fakeAPI: newFakeAPI(t), log: &syncedBuffer{}}
	b.machine, _ = inventoryOf(t, m)
	if prepare != nil {
		prepare(b.fakeAPI)
	}
	b.start()
	return b
}

// start runs a new publisher until stop() is called or the test ends.
func (b *publisherLab) start() {
	b.registry = prometheus.NewRegistry()
	claims := b.TempDir()
	b.driver = New(Options{Node: "node-a", Client: b.newClient(), Claims: claims, Records: claim.NewCache(claims, ""), Metrics: b.registry,
		Log: slog.New(slog.NewTextHandler(b.log, nil))})
	b.driver.Update(b.machine.Inventory)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.driver.slices.publish(ctx)
	}()
	b.stop = sync.OnceFunc(func() { cancel(); <-done })
	b.Cleanup(b.stop)
}

// setFault sets or clears a fault of all VFs of a PF in one update, like the daemon, also for a later start.
func (b *publisherLab) setFault(pf int, kind string) {
	i := &b.machine.Inventory
	i.Faults = map[string]Fault{}
	of := i.Pools[0].Devices[pf*len(i.Pools[0].Devices)/b.pfs()].PF
	for _, d := range i.Pools[0].Devices {
		if d.PF == of && kind != "" {
			i.Faults[d.Address.String()] = Fault{kind, "x"}
		}
	}
	b.driver.Update(*i)
}

func (b *publisherLab) pfs() (n int) {
	for _, d := range b.machine.Snapshot.Devices {
		if !d.IsVF() {
			n++
		}
	}
	return n
}

// isComplete reports whether the slices form one generation of the pool with the given numbers of slices, devices and taints.
func (b *publisherLab) isComplete(count, devices, taints int) bool {
	all := b.storedSlices()
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

func (b *publisherLab) await(what string, so func() bool) {
	b.Helper()
	await(b.TB, what, so)
}

// awaitQuiet waits until no more write requests arrive, and returns the number of write requests.
func (b *publisherLab) awaitQuiet() (writes int) {
	for writes = -1; writes != b.countWrites(); time.Sleep(3 * syncDelay) {
		writes = b.countWrites()
	}
	return writes
}

// metricValue returns the sum of a publisher's metric over all labels.
func (b *publisherLab) metricValue(name string) float64 {
	b.Helper()
	return gatheredValue(b, b.registry, "podlace_sriov_dra_"+name)
}

func gatheredValue(t testing.TB, from prometheus.Gatherer, name string) (sum float64) {
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

// countLogged returns the number of times that a text is in the log.
func (b *publisherLab) countLogged(text string) int { return strings.Count(b.log.String(), text) }

// TestPublished: the publisher creates slices that the Node owns, and writes them again only after a change, also across a restart. It
// deletes none when it ends.
func TestPublished(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 2, PFs: 2, VFs: 3}, nil)
	b.await("4 slices", func() bool { return b.isComplete(4, 12, 0) })
	first := b.storedSlices()
	want := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node-a", UID: "uid-1", Controller: new(true)}}
	if diff := cmp.Diff(want, first[0].OwnerReferences); diff != "" || !strings.HasPrefix(first[0].Name, "00000-sriov.podlace.io-node-a-") {
		t.Errorf("%s: %s", first[0].Name, diff)
	}
	if n := b.awaitQuiet(); n != 4 {
		t.Errorf("%d writes", n)
	}
	if b.metricValue("up") != 1 || b.metricValue("slices") != 4 || b.metricValue("writes_total") != 4 || b.metricValue("slices_refused") != 0 {
		t.Error("metrics are wrong")
	}
	for range 2 {
		b.stop()
		b.start()
		b.await("up", func() bool { return b.metricValue("up") == 1 })
		b.awaitQuiet()
	}
	if diff := cmp.Diff(first, b.storedSlices()); diff != "" || b.countWrites() != 4 {
		t.Errorf("%d writes: %s", b.countWrites(), diff)
	}
	if n := b.countRequests("watch"); n > 3 { // one for each start
		t.Errorf("%d watches", n)
	}
}

// TestEmpty checks that a node without VFs publishes an empty slice.
func TestEmpty(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1}, nil)
	b.await("an empty slice", func() bool { return b.isComplete(1, 0, 0) })
	b.await("the log of the slice", func() bool { return b.countLogged("slices=1 devices=0") == 1 })
}

// TestOneWrite checks that the failure of a PF's link is one write and its recovery another, and that a restart keeps the TimeAdded of
// a taint.
func TestOneWrite(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 64}, nil)
	b.await("2 slices", func() bool { return b.isComplete(2, 128, 0) })
	before := b.awaitQuiet()
	start := time.Now()
	b.setFault(1, LinkDown)
	b.await("taints", func() bool { return b.isComplete(2, 128, 64) })
	t.Logf("taints are stored after %s", time.Since(start))
	if n := b.awaitQuiet() - before; n != 1 {
		t.Errorf("%d writes for a link that goes down", n)
	}
	down := b.storedSlices()
	b.stop()
	b.start()
	b.awaitQuiet()
	if diff := cmp.Diff(taintsOf(down), taintsOf(b.storedSlices())); diff != "" {
		t.Error(diff)
	}
	before = b.awaitQuiet()
	b.setFault(1, "")
	b.await("no taints", func() bool { return b.isComplete(2, 128, 0) })
	if n := b.awaitQuiet() - before; n != 1 {
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

// TestSliceDeleted and TestSliceEdited: the publisher restores slices that a kubelet or a user changes, even after a broken watch.
func TestSliceDeleted(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.isComplete(2, 4, 0) })
	b.awaitQuiet()
	for name, remove := range map[string]func(){
		"one":                  func() { b.removeSlices(false, b.storedSlices()[1].Name) },
		"all, as by a kubelet": func() { b.removeSlices(false) },
		"and right after they were written": func() {
			b.removeSlices(false)
			b.await("a slice", func() bool { return len(b.storedSlices()) > 0 })
			b.removeSlices(false)
		},
		"while the watch is broken": func() { b.removeSlices(true); b.endWatches(true) },
	} {
		remove()
		start := time.Now()
		b.await("the slices are back: "+name, func() bool { return b.isComplete(2, 4, 0) })
		if took := time.Since(start); took > maxWait {
			t.Errorf("%s: %s", name, took)
		} else {
			t.Logf("%s: back after %s", name, took)
		}
		b.awaitQuiet()
	}
}

// TestLostCreate: a user deletes a slice before the watch has reported its creation. The daemon restores the slice after forgetAfter.
func TestLostCreate(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.isComplete(1, 2, 0) })
	b.awaitQuiet()
	created := b.countRequests("create")
	b.removeSlices(false)
	b.configure(func() { b.muted = true })
	b.await("another slice", func() bool { return b.countRequests("create") > created && b.isComplete(1, 2, 0) })
	b.removeSlices(true)
	b.configure(func() { b.muted = false })
	b.endWatches(true)
	start := time.Now()
	b.await("the slice is back", func() bool { return b.isComplete(1, 2, 0) })
	if took := time.Since(start); took > maxWait {
		t.Error(took)
	} else {
		t.Logf("back after %s", took)
	}
}

func TestSliceEdited(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2}, nil)
	b.await("2 slices", func() bool { return b.isComplete(2, 4, 0) })
	b.awaitQuiet()
	want := b.storedSlices()
	for name, edit := range map[string]func(*resourceapi.ResourceSlice){
		"a device less": func(s *resourceapi.ResourceSlice) { s.Spec.Devices = s.Spec.Devices[:1] },
		"an attribute":  func(s *resourceapi.ResourceSlice) { s.Spec.Devices[0].Attributes["vf"] = number(77) },
		"a taint": func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "x", Effect: "NoSchedule"}}
		},
		"the generation": func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Generation += 7 },
	} {
		b.editSlice(want[1].Name, edit)
		start := time.Now()
		same := func() bool {
			return b.isComplete(2, 4, 0) && cmp.Equal(deviceSpecs(want), deviceSpecs(b.storedSlices()))
		}
		b.await("the slice is as it was: "+name, same)
		t.Logf("%s: back after %s", name, time.Since(start))
		b.awaitQuiet()
	}
}

func deviceSpecs(all []resourceapi.ResourceSlice) (out [][]resourceapi.Device) {
	for _, s := range all {
		out = append(out, s.Spec.Devices)
	}
	return out
}

// TestWatchEnds checks that a watch that ended with status 410 or otherwise is restarted without a write or log line.
func TestWatchEnds(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.isComplete(1, 2, 0) })
	before, watches := b.awaitQuiet(), b.countRequests("watch")
	for _, gone := range []bool{true, false} {
		b.endWatches(gone)
		b.await("another watch", func() bool { return b.countRequests("watch") > watches && b.isWatched() })
		watches = b.countRequests("watch")
	}
	if b.awaitQuiet() != before || b.countLogged("level=WARN") > 0 {
		t.Errorf("%d writes\n%s", b.countWrites()-before, b.log)
	}
}

// TestConflict checks that the publisher repeats an update if another writer changed the slice first.
func TestConflict(t *testing.T) {
	t.Parallel()
	b := newBench(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2}, nil)
	b.await("a slice", func() bool { return b.isComplete(1, 2, 0) })
	b.awaitQuiet()
	b.configure(func() { b.refuse["update"] = http.StatusConflict })
	b.setFault(0, LinkDown)
	b.await("a conflict", func() bool { return b.countRequests("update") > 0 })
	b.configure(func() { delete(b.refuse, "update") })
	b.await("taints", func() bool { return b.isComplete(1, 2, 2) })
	if b.countLogged("level=WARN") > 0 {
		t.Error(b.log)
	}
}
