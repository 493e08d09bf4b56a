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
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/podlace/podlace/pkg/claim"
)

const (
	// syncDelay is the time from an event to the comparison of the slices, so that one comparison handles the deletion of all slices by
	// a kubelet that starts. The library's default is 30 s.
	syncDelay = time.Second
	// forgetAfter is how long the event of a new slice may take before the library assumes that the slice is missing, because another
	// program may have deleted it during a broken watch. The library's default is a minute.
	forgetAfter = 2 * time.Second
	// featureRetry is how long after the API server has dropped a field the publisher sends it again.
	featureRetry = time.Hour

	requestTimeout = 30 * time.Second
	firstRetry     = time.Second
	lastRetry      = time.Minute
)

// publisher keeps the slices of the node up to date. It computes the desired ones, which the library's controller compares and writes,
// and logs and counts failed requests.
type publisher struct {
	*Driver

	former  map[string]resourceapi.Device // by name: devices as last published
	records []claim.Record                // as last read

	mu         sync.Mutex
	controller *resourceslice.Controller      // nil while it does not run
	problems   map[string]metav1.StatusReason // reasons of failures, by request
	submitted  *resourceslice.DriverResources // given to the controller last
	syncing    *resourceslice.DriverResources // given when the controller's current comparison began
	accepted   *resourceslice.DriverResources // last resources that the API server accepted completely
	refused    *resourceslice.DriverResources // resources refused since then; nil if none
	disabled   map[string]time.Time           // features that the API server drops: when to try these features again
}

func newPublisher(d *Driver) *publisher {
	p := &publisher{Driver: d, problems: map[string]metav1.StatusReason{}, disabled: map[string]time.Time{}}
	if d.options.Metrics != nil {
		d.options.Metrics.MustRegister(sliceMetrics{p})
	}
	return p
}

// publish keeps the node's slices up to date until ctx is done, after which they stay in the API server. It may be called more than
// once.
func (p *publisher) publish(ctx context.Context) {
	ctx = klog.NewContext(ctx, logr.Discard()) // the publisher logs what the library would log
	for backoff := (wait.Backoff{Duration: firstRetry, Factor: 2, Jitter: 0.3, Steps: 10, Cap: lastRetry}); ctx.Err() == nil; {
		_ = p.run(ctx) // noteResult has logged the error
		select {
		case <-ctx.Done():
		case <-time.After(backoff.Step()):
		}
	}
}

// run publishes the slices until ctx is done. It fails if the API server is unreachable, lacks the API, or denies access to the Node or
// the slices.
func (p *publisher) run(ctx context.Context) error {
	uid, err := p.nodeUID(ctx)
	if err != nil {
		return err
	}
	stored, err := p.storedSlices(ctx)
	if err != nil {
		return err
	}
	p.reset(stored)
	inventory, news := p.watchInventory()
	first, delay, ttl := p.computeDesired(inventory), syncDelay, forgetAfter
	p.locked(func() { p.submitted = first })
	c, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: claim.Driver, KubeClient: p.client(), Resources: first, SyncDelay: &delay, MutationCacheTTL: &ttl, Queue: newQueue(p),
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.options.Node, UID: uid},
		ErrorHandler: func(_ context.Context, err error, _ string) { p.handleError(err) },
	})
	if err != nil {
		return err
	}
	defer c.Stop()
	p.locked(func() { p.controller = c })
	defer p.locked(func() { p.controller = nil })
	p.options.Log.Info("ResourceSlices are published", "node", p.options.Node, "slices",
		len(first.Pools[p.options.Node].Slices), "devices", len(p.former))
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-news:
		case <-time.After(featureRetry):
		}
		inventory, news = p.watchInventory()
		p.update(c, p.computeDesired(inventory))
	}
}

// storedSlices returns the node's slices from the API server. The library reads them too, but does not report why a read fails.
func (p *publisher) storedSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	selector := fields.Set{resourceapi.ResourceSliceSelectorDriver: claim.Driver, resourceapi.ResourceSliceSelectorNodeName: p.options.Node}
	list, err := p.client().List(ctx, metav1.ListOptions{FieldSelector: selector.String()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices of node %s: %w", p.options.Node, err)
	}
	slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return list.Items, nil
}

// computeDesired returns the desired slices, and stores their devices for the next call.
func (p *publisher) computeDesired(i Inventory) *resourceslice.DriverResources {
	if records, err := p.Driver.records.List(); err == nil { // otherwise keep the former records; the daemon has logged the error
		p.records = records
	}
	now := time.Now()
	r := desiredState{Inventory: i, node: p.options.Node, records: p.records, former: p.former, now: now,
		sliceFeatures: p.currentFeatures(now)}.driverResources()
	p.former = devicesByName(r.Pools[p.options.Node].Slices)
	return r
}

// update passes changed slices to the controller, or the last accepted ones if the API server has refused these, so that the pool stays
// complete. Get waits for the lock until p.submitted has changed, so the comparison that Update causes counts for the new slices. One
// that already runs may read them but counts for the former ones, which the next comparison corrects.
func (p *publisher) update(c *resourceslice.Controller, want *resourceslice.DriverResources) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refused != nil && equal(want, p.refused) {
		want = p.accepted
	} else {
		p.refused = nil
	}
	if !equal(want, p.submitted) {
		c.Update(want)
		p.submitted = want
	}
}

func equal(a, b *resourceslice.DriverResources) bool { return apiequality.Semantic.DeepEqual(a, b) }

// reset deletes what an earlier run has stored in the publisher, except the slices that are in the API server.
func (p *publisher) reset(stored []resourceapi.ResourceSlice) {
	var out []resourceslice.Slice
	for _, s := range stored {
		out = append(out, resourceslice.Slice{Devices: s.Spec.Devices, SharedCounters: s.Spec.SharedCounters})
	}
	p.former = devicesByName(out)
	p.locked(func() {
		p.refused = nil
		p.accepted = &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.options.Node: {Slices: out}}}
	})
}

func (p *publisher) locked(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// handleError handles an error that the controller reports. The controller repeats the comparison after most errors.
func (p *publisher) handleError(err error) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		for _, f := range dropped.DisabledFeatures() {
			p.disable(f, "the API server drops fields of ResourceSlices: it has disabled a feature", nil)
		}
	case apierrors.IsInvalid(err):
		p.noteRefusal(err)
	case !apierrors.IsConflict(err) && !apierrors.IsNotFound(err): // another program has changed or deleted the slice
		p.noteResult(requestWrite, err)
	}
}
