// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	kwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	resourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/watchlist"
	"k8s.io/client-go/util/workqueue"
)

// observedClient is a Kubernetes client that shows each request for slices to the publisher. The Kubernetes library does not report which
// slices it reads and writes. The Kubernetes library also does not report when an error has ended.
type observedClient struct {
	kubernetes.Interface
	*publisher
}

// ResourceV1 returns the client's interface for resource.k8s.io/v1. The publisher sees each request for ResourceSlices that goes through
// this interface.
func (o observedClient) ResourceV1() resourcev1.ResourceV1Interface {
	return observedGroup{o.Interface.ResourceV1(), o.publisher}
}

// IsWatchListSemanticsUnSupported returns the result of the wrapped client's method with the same name. The library client-go calls this
// method to learn whether the client supports streaming lists.
func (o observedClient) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(o.Interface)
}

type observedGroup struct {
	resourcev1.ResourceV1Interface
	*publisher
}

// ResourceSlices returns the client's interface for slices. The publisher sees each request for ResourceSlices that goes through this
// interface.
func (g observedGroup) ResourceSlices() resourcev1.ResourceSliceInterface {
	return observedSlices{g.ResourceV1Interface.ResourceSlices(), g.publisher}
}

type observedSlices struct {
	resourcev1.ResourceSliceInterface
	*publisher
}

// List calls the client and reports the result to the publisher.
func (s observedSlices) List(ctx context.Context, o metav1.ListOptions) (*resourceapi.ResourceSliceList, error) {
	list, err := s.ResourceSliceInterface.List(ctx, o)
	s.noteResult(ctx, "list", err)
	return list, err
}

// Watch calls the client and reports the result to the publisher.
func (s observedSlices) Watch(ctx context.Context, o metav1.ListOptions) (kwatch.Interface, error) {
	w, err := s.ResourceSliceInterface.Watch(ctx, o)
	if err == nil || o.SendInitialEvents == nil { // otherwise client-go falls back to a list
		s.noteResult(ctx, "watch", err)
	}
	if err == nil && o.SendInitialEvents != nil { // the watch replaces the list
		s.noteResult(ctx, "list", nil)
	}
	return w, err
}

// Create creates a ResourceSlice that is owned by the current Node object. If the owner had the UID of a deleted Node, the garbage
// collector would delete the slice at once.
func (s observedSlices) Create(ctx context.Context, slice *resourceapi.ResourceSlice, o metav1.CreateOptions) (*resourceapi.ResourceSlice,
	error) {
	uid, err := s.nodeUID(ctx)
	if err != nil {
		return nil, err
	}
	for i := range slice.OwnerReferences {
		slice.OwnerReferences[i].UID = uid
	}
	stored, err := s.ResourceSliceInterface.Create(ctx, slice, o)
	s.noteWrite(ctx, "create", err)
	return stored, err
}

// Update calls the client and reports the result to the publisher.
func (s observedSlices) Update(ctx context.Context, slice *resourceapi.ResourceSlice, o metav1.UpdateOptions) (*resourceapi.ResourceSlice,
	error) {
	stored, err := s.ResourceSliceInterface.Update(ctx, slice, o)
	s.noteWrite(ctx, "update", err)
	return stored, err
}

// Delete calls the client and reports the result to the publisher.
func (s observedSlices) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	err := s.ResourceSliceInterface.Delete(ctx, name, o)
	s.noteWrite(ctx, "delete", err)
	return err
}

// nodeUID returns the UID of the Node object of this node.
func (p *publisher) nodeUID(ctx context.Context) (types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	node, err := p.options.Client.CoreV1().Nodes().Get(ctx, p.options.Node, metav1.GetOptions{})
	p.noteResult(ctx, verbNode, err)
	if err != nil {
		return "", fmt.Errorf("get node %s: %w", p.options.Node, err)
	}
	return node.UID, nil
}

// poolQueue is the library's queue of pools that must be synchronized. The queue reports to the publisher when a synchronization starts and
// when it succeeds. After a failed synchronization, poolQueue retries within a minute. By default, the pause between two retries of the
// library grows up to 1,000 s.
type poolQueue struct {
	workqueue.TypedRateLimitingInterface[string]
	limiter workqueue.TypedRateLimiter[string]
	p       *publisher
}

func newQueue(p *publisher) poolQueue {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)
	return poolQueue{workqueue.NewTypedRateLimitingQueue(limiter), limiter, p}
}

// Get returns the next pool from the queue.
func (q poolQueue) Get() (string, bool) {
	pool, shutdown := q.TypedRateLimitingInterface.Get()
	q.p.noteSyncStart()
	return pool, shutdown
}

// AddRateLimited adds a pool to the queue after a failed synchronization.
func (q poolQueue) AddRateLimited(pool string) {
	q.AddAfter(pool, wait.Jitter(q.limiter.When(pool), jitter))
}

// Forget marks a pool as synchronized.
func (q poolQueue) Forget(pool string) {
	q.TypedRateLimitingInterface.Forget(pool)
	q.p.noteSynced()
}

// backoff() returns the pause before the next retry after n consecutive failures.
func backoff(n int) time.Duration {
	return wait.Jitter(min(firstRetry<<min(n, 10), lastRetry), jitter)
}
