// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/podlace/podlace/pkg/claim"
)

const (
	// syncDelay is the time between an event and the next comparison of the slices. When a kubelet starts, it deletes all slices of its node.
	// Because of the delay, one comparison handles all these events.
	syncDelay = time.Second
	// forgetAfter is the maximum time between the creation of a slice and its event in the watch. If the event does not arrive in time, the
	// library assumes that the slice is missing. Another program may have deleted the slice while the watch was broken.
	forgetAfter = 2 * time.Second
	// featureRetry is the pause after the API server has dropped a field. After this pause, the publisher sends the field again.
	featureRetry = time.Hour

	requestTimeout = 30 * time.Second
	firstRetry     = time.Second
	lastRetry      = time.Minute
	jitter         = 0.3
)

// The type publisher keeps the slices of the node up to date. The controller of the Kubernetes library compares the slices with the desired
// slices and writes the differences. The publisher computes the desired slices. The publisher also logs failed requests and counts them in
// metrics.
type publisher struct {
	*Driver
	count sliceMetrics
	wake  chan struct{} // receives when the controller has reported something

	former  map[string]resourceapi.Device // by name: devices as last published
	records []claim.Record                // as last read

	mu        sync.Mutex
	running   bool
	problems  map[string]string              // by verb: reason of a lasting failure
	submitted *resourceslice.DriverResources // given to the controller last
	syncing   *resourceslice.DriverResources // given when the controller's current comparison began
	accepted  *resourceslice.DriverResources // last resources that the API server accepted completely
	refused   *resourceslice.DriverResources // resources refused since then; nil if none
	failing   bool                           // a request of the current comparison was refused
	disabled  map[string]time.Time           // features that the API server drops: when to try these features again
}

func newPublisher(d *Driver) *publisher {
	p := &publisher{Driver: d, wake: make(chan struct{}, 1), problems: map[string]string{}, disabled: map[string]time.Time{}}
	p.count = newSliceMetrics(d.options.Metrics, p)
	return p
}

// publish() keeps the slices of the node up to date until ctx is done. After publish() returns, the slices stay in the API server.
// publish() may be called more than once.
func (p *publisher) publish(ctx context.Context) {
	ctx = klog.NewContext(ctx, logr.Discard()) // the publisher logs what the library would log
	for failures := 0; ; failures++ {
		err := p.run(ctx)
		wait := backoff(failures)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			wait = lastRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// run() publishes the slices until ctx is done. run() returns an error if the API server is unreachable, lacks the API, or does not allow
// access to the Node object or the slices. The returned error is already logged.
func (p *publisher) run(ctx context.Context) error {
	if _, err := p.nodeUID(ctx); err != nil {
		return err
	}
	stored, err := p.storedSlices(ctx)
	if err != nil {
		return err
	}
	inventory, ok := p.firstInventory(ctx)
	if !ok {
		return ctx.Err()
	}
	p.former = formerDevices(stored)
	p.reset(stored)
	first := p.computeDesired(inventory)
	p.submit(func() {}, first)
	c, err := resourceslice.StartController(ctx, p.controllerOptions(first))
	if err != nil {
		return fmt.Errorf("publish slices: %w", err)
	}
	defer c.Stop()
	p.setRunning(true)
	defer p.setRunning(false)
	p.options.Log.Info("ResourceSlices are published", "node", p.options.Node, "content", describeSlices(first))
	for {
		inventory, changed, _ := p.watchInventory()
		p.update(c, inventory)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-p.wake:
		case <-time.After(featureRetry):
		}
	}
}

// storedSlices returns the current slices of the node from the API server. The library also reads the slices, but does not report why a
// read fails.
func (p *publisher) storedSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	selector := fields.Set{resourceapi.ResourceSliceSelectorDriver: claim.Driver, resourceapi.ResourceSliceSelectorNodeName: p.options.Node}
	list, err := p.client().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: selector.String()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices of node %s: %w", p.options.Node, err)
	}
	return list.Items, nil
}

func (p *publisher) client() observedClient { return observedClient{p.options.Client, p} }

// firstInventory waits for the first inventory from the daemon and returns it.
func (p *publisher) firstInventory(ctx context.Context) (Inventory, bool) {
	for {
		i, changed, ok := p.watchInventory()
		if ok {
			return i, true
		}
		select {
		case <-ctx.Done():
			return i, false
		case <-changed:
		}
	}
}

func (p *publisher) controllerOptions(first *resourceslice.DriverResources) resourceslice.Options {
	delay, ttl := syncDelay, forgetAfter
	return resourceslice.Options{
		DriverName: claim.Driver, KubeClient: p.client(), Resources: first, SyncDelay: &delay, MutationCacheTTL: &ttl, Queue: newQueue(p),
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.options.Node},
		ErrorHandler: func(_ context.Context, err error, _ string) { p.handleError(err) },
	}
}

// computeDesired returns the desired slices, and stores their devices for the next call.
func (p *publisher) computeDesired(i Inventory) *resourceslice.DriverResources {
	if records, err := p.Driver.records.List(); err == nil { // otherwise keep the former records; the daemon has logged the error
		p.records = records
	}
	now := time.Now()
	r := desiredState{Inventory: i, node: p.options.Node, records: p.records, former: p.former, now: now,
		sliceFeatures: p.currentFeatures(now)}.driverResources()
	p.former = map[string]resourceapi.Device{}
	for _, s := range r.Pools[p.options.Node].Slices {
		for _, dev := range s.Devices {
			p.former[dev.Name] = dev
		}
	}
	return r
}

// update() passes the desired slices to the controller if they have changed. If the API server has refused slices, update() does not pass
// the same slices again. After a refusal, the former slices remain in the API server.
func (p *publisher) update(c *resourceslice.Controller, i Inventory) {
	want := p.computeDesired(i)
	p.mu.Lock()
	if p.refused != nil && equal(want, p.refused) {
		if want = p.accepted; want == nil {
			want = p.submitted
		}
	} else {
		p.refused = nil
	}
	same := equal(want, p.submitted)
	p.mu.Unlock()
	if !same {
		p.submit(func() { c.Update(want) }, want)
	}
}

// submit() passes slices to the controller. submit() holds the lock during the update, so that no comparison starts before p.submitted is
// changed. Without the lock, the publisher could attribute a result to the wrong slices.
func (p *publisher) submit(update func(), r *resourceslice.DriverResources) {
	p.mu.Lock()
	defer p.mu.Unlock()
	update()
	p.submitted = r
}

func equal(a, b *resourceslice.DriverResources) bool { return apiequality.Semantic.DeepEqual(a, b) }

// reset() deletes the state that an earlier call of run() has stored in the publisher. After reset(), the publisher knows only the slices
// that are stored in the API server.
func (p *publisher) reset(stored []resourceapi.ResourceSlice) {
	slices.SortFunc(stored, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	var out []resourceslice.Slice
	for _, s := range stored {
		if s.Spec.Pool.Name == p.options.Node {
			out = append(out, resourceslice.Slice{Devices: s.Spec.Devices, SharedCounters: s.Spec.SharedCounters})
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.accepted, p.refused, p.syncing = nil, nil, nil
	if len(out) > 0 {
		p.accepted = &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.options.Node: {Slices: out}}}
	}
}

func (p *publisher) setRunning(running bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = running
}

// handleError handles an error that the controller reports.
func (p *publisher) handleError(err error) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		p.noteDropped(dropped.DisabledFeatures())
	case apierrors.IsInvalid(err):
		p.noteRefusal(err)
	}
}

// notify() wakes the loop in run().
func (p *publisher) notify() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}
