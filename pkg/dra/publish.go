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
	// syncDelay is how long after an event the slices are compared: kubelets delete all slices of a node in one go when they start.
	syncDelay = time.Second
	// forgetAfter is how long the library counts a slice as there that it made and never saw: it may have been deleted while the watch was
	// broken.
	forgetAfter = 2 * time.Second
	// featureRetry is how long after the API server dropped a field the field is tried again.
	featureRetry = time.Hour

	requestTimeout = 30 * time.Second
	firstRetry     = time.Second
	lastRetry      = time.Minute
	jitter         = 0.3
)

// publisher keeps the slices of the node. The library's controller compares them with what is desired and writes them; the publisher
// decides what is desired and reports what happens.
type publisher struct {
	*Driver
	count sliceMetrics
	wake  chan struct{} // the controller has reported something

	former  map[string]resourceapi.Device // as published last, by name
	records []claim.Record                // as read last

	mu       sync.Mutex
	running  bool
	problems map[string]string              // by verb: the reason of a failure that lasts
	given    *resourceslice.DriverResources // to the controller
	syncing  *resourceslice.DriverResources // what was given when the controller last began to compare
	accepted *resourceslice.DriverResources // what the API server last took as a whole
	refused  *resourceslice.DriverResources // what it refused since; nil if nothing
	failing  bool                           // the present comparison met a refusal
	off      map[string]time.Time           // features that the API server drops: when to try them again
}

func newPublisher(d *Driver) *publisher {
	p := &publisher{Driver: d, wake: make(chan struct{}, 1), problems: map[string]string{}, off: map[string]time.Time{}}
	p.count = newSliceMetrics(d.options.Metrics, p)
	return p
}

// publish keeps the slices of the node as they should be until ctx is done. Slices stay when it ends. It may be called again after that.
func (p *publisher) publish(ctx context.Context) {
	ctx = klog.NewContext(ctx, logr.Discard()) // the publisher reports what the library would log
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

// run publishes until ctx is done. It fails if the API server is away, lacks the API or refuses to show the Node object or the slices;
// the failure is logged.
func (p *publisher) run(ctx context.Context) error {
	if _, err := p.nodeUID(ctx); err != nil {
		return err
	}
	stored, err := p.stored(ctx)
	if err != nil {
		return err
	}
	inventory, ok := p.firstInventory(ctx)
	if !ok {
		return ctx.Err()
	}
	p.former = formerDevices(stored)
	p.reset(stored)
	first := p.desire(inventory)
	p.give(func() {}, first)
	c, err := resourceslice.StartController(ctx, p.controllerOptions(first))
	if err != nil {
		return fmt.Errorf("publish slices: %w", err)
	}
	defer c.Stop()
	p.setRunning(true)
	defer p.setRunning(false)
	p.options.Log.Info("ResourceSlices are kept", "node", p.options.Node, "content", describe(first))
	for {
		inventory, changed, _ := p.watch()
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

// stored returns the slices of the node as they are. The library would not say why it cannot read them.
func (p *publisher) stored(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	selector := fields.Set{resourceapi.ResourceSliceSelectorDriver: claim.Driver, resourceapi.ResourceSliceSelectorNodeName: p.options.Node}
	list, err := p.client().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: selector.String()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices of node %s: %w", p.options.Node, err)
	}
	return list.Items, nil
}

func (p *publisher) client() observed { return observed{p.options.Client, p} }

// firstInventory waits until there is one.
func (p *publisher) firstInventory(ctx context.Context) (Inventory, bool) {
	for {
		i, changed, ok := p.watch()
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
		ErrorHandler: func(_ context.Context, err error, _ string) { p.failed(err) },
	}
}

// desire returns what to publish, and remembers it.
func (p *publisher) desire(i Inventory) *resourceslice.DriverResources {
	if records, err := p.Driver.records.List(); err == nil { // else the former ones count; the daemon has logged it
		p.records = records
	}
	now := time.Now()
	r := desired{Inventory: i, node: p.options.Node, records: p.records, former: p.former, now: now, features: p.features(now)}.resources()
	p.former = map[string]resourceapi.Device{}
	for _, s := range r.Pools[p.options.Node].Slices {
		for _, dev := range s.Devices {
			p.former[dev.Name] = dev
		}
	}
	return r
}

// update gives the controller what is desired, if that is another than before. What the API server refused is not tried again; the former
// slices stay.
func (p *publisher) update(c *resourceslice.Controller, i Inventory) {
	want := p.desire(i)
	p.mu.Lock()
	if p.refused != nil && equal(want, p.refused) {
		if want = p.accepted; want == nil {
			want = p.given
		}
	} else {
		p.refused = nil
	}
	same := equal(want, p.given)
	p.mu.Unlock()
	if !same {
		p.give(func() { c.Update(want) }, want)
	}
}

// give gives resources to the controller. No comparison begins meanwhile, so that it is known what each one is about.
func (p *publisher) give(update func(), r *resourceslice.DriverResources) {
	p.mu.Lock()
	defer p.mu.Unlock()
	update()
	p.given = r
}

func equal(a, b *resourceslice.DriverResources) bool { return apiequality.Semantic.DeepEqual(a, b) }

// reset forgets what another run gave and met, and remembers what slices have.
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

// failed takes an error of the controller.
func (p *publisher) failed(err error) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		p.dropped(dropped.DisabledFeatures())
	case apierrors.IsInvalid(err):
		p.refuse(err)
	}
}

// notify wakes the loop.
func (p *publisher) notify() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}
