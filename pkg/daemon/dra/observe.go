// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	resourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/workqueue"
)

// observedClient is a Kubernetes client that shows the results of lists and watches of slices to the publisher. The library only logs
// errors and does not report their end. It is also its own interface for resource.k8s.io/v1 and for slices.
type observedClient struct {
	kubernetes.Interface
	resourcev1.ResourceV1Interface
	resourcev1.ResourceSliceInterface
	p *publisher
}

func (p *publisher) client() observedClient {
	group := p.options.Client.ResourceV1()
	return observedClient{p.options.Client, group, group.ResourceSlices(), p}
}

// ResourceV1 returns the client's interface for resource.k8s.io/v1.
func (o observedClient) ResourceV1() resourcev1.ResourceV1Interface { return o }

// ResourceSlices returns the client's interface for slices.
func (o observedClient) ResourceSlices() resourcev1.ResourceSliceInterface { return o }

// IsWatchListSemanticsUnSupported makes client-go list before it watches: the slices of one node need no stream.
func (o observedClient) IsWatchListSemanticsUnSupported() bool { return true }

// List calls the client and reports the result to the publisher.
func (o observedClient) List(ctx context.Context, options metav1.ListOptions) (*resourceapi.ResourceSliceList, error) {
	list, err := o.ResourceSliceInterface.List(ctx, options)
	o.p.noteResult(requestList, err)
	return list, err
}

// Watch calls the client and reports the result to the publisher.
func (o observedClient) Watch(ctx context.Context, options metav1.ListOptions) (kwatch.Interface, error) {
	w, err := o.ResourceSliceInterface.Watch(ctx, options)
	o.p.noteResult(requestWatch, err)
	return w, err
}

// Create creates a ResourceSlice owned by the current Node. The library reads the Node's UID only once, and the garbage collector
// deletes slices of a deleted Node at once.
func (o observedClient) Create(ctx context.Context, slice *resourceapi.ResourceSlice, options metav1.CreateOptions) (
	*resourceapi.ResourceSlice, error) {
	uid, err := o.p.nodeUID(ctx)
	if err != nil {
		return nil, err
	}
	slice.OwnerReferences[0].UID = uid
	return o.ResourceSliceInterface.Create(ctx, slice, options)
}

func (p *publisher) nodeUID(ctx context.Context) (types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	node, err := p.options.Client.CoreV1().Nodes().Get(ctx, p.options.Node, metav1.GetOptions{})
	p.noteResult(requestNode, err)
	if err != nil {
		return "", fmt.Errorf("get node %s: %w", p.options.Node, err)
	}
	return node.UID, nil
}

// poolQueue is the library's queue of pools to compare. It tells the publisher when a comparison starts and succeeds, and retries a
// failed one within a minute, while the library's pause grows up to 1,000 s.
type poolQueue struct {
	workqueue.TypedRateLimitingInterface[string]
	p *publisher
}

func newQueue(p *publisher) poolQueue {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)
	return poolQueue{workqueue.NewTypedRateLimitingQueue(limiter), p}
}

// Get returns the next pool from the queue.
func (q poolQueue) Get() (string, bool) {
	pool, shutdown := q.TypedRateLimitingInterface.Get()
	q.p.locked(func() { q.p.syncing = q.p.submitted })
	return pool, shutdown
}

// Forget marks a pool as synchronized.
func (q poolQueue) Forget(pool string) {
	q.TypedRateLimitingInterface.Forget(pool)
	q.p.noteResult(requestWrite, nil)
	q.p.locked(func() { q.p.accepted = q.p.syncing })
}
