// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/pkg/pool"
)

// maxRequests is how many containers one call may ask for; the kubelet asks for one.
const maxRequests = 128

// endpoint answers the kubelet's questions about one resource. What it offers comes by update, and goes to every stream by itself.
type endpoint struct {
	pluginapi.UnimplementedDevicePluginServer
	resource string
	log      *slog.Logger
	count    counters
	gate     *gate

	mu      sync.Mutex
	offer   *offer
	changed chan struct{} // closed as soon as offer is another
	streams int
	leaving bool // its devices are given out by claims from now on
}

func newEndpoint(resource string, first *offer, log *slog.Logger, count counters, g *gate) *endpoint {
	return &endpoint{resource: resource, log: log.With("resource", resource), count: count, gate: g, offer: first,
		changed: make(chan struct{})}
}

// update replaces the offer. Streams that are still busy with an earlier one skip what came between.
func (e *endpoint) update(o *offer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.offer = o
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *endpoint) now() (o *offer, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.offer, e.changed
}

// watched tells how many streams there are.
func (e *endpoint) watched() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.streams
}

func (e *endpoint) stream(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.streams += n
}

// options is what Register says and GetDevicePluginOptions answers; the kubelet takes the one or the other by how a plugin registers.
//
// A pod may ask for a resource by its limits and get the devices by a claim. The kubelet, at least up to 1.37, refuses to start the
// containers of this pod while it knows an endpoint of the resource that requires PreStartContainer: the pod has no device of the endpoint.
func (e *endpoint) options() *pluginapi.DevicePluginOptions {
	e.mu.Lock()
	defer e.mu.Unlock()
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: !e.leaving}
}

// GetDevicePluginOptions names the optional calls that are answered.
func (e *endpoint) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return e.options(), nil
}

// ListAndWatch sends all devices at once and whenever one of them changes.
func (e *endpoint) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	e.stream(1)
	defer e.stream(-1)
	e.log.Info("the kubelet watches the resource")
	var sent *offer
	for {
		o, changed := e.now()
		if sent == nil || !o.same(sent) {
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: o.devices}); err != nil {
				return err
			}
			sent = o
		}
		select {
		case <-stream.Context().Done():
			e.log.Info("the kubelet does not watch the resource any more")
			return nil
		case <-changed:
		}
	}
}

// GetPreferredAllocation never fails: the kubelet would refuse the pod. On doubt it returns what it was offered, in order.
func (e *endpoint) GetPreferredAllocation(_ context.Context,
	r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	o, _ := e.now()
	start := time.Now()
	defer func() { e.count.preferred.WithLabelValues(e.resource).Observe(time.Since(start).Seconds()) }()
	out := &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids := pool.Prefer(o.policy(), o.topology, c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		out.ContainerResponses = append(out.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return out, nil
}

// Allocate tells what a container needs to use the devices. It fails, and with it the pod, when a device is asked for twice, or is not
// there any more.
func (e *endpoint) Allocate(_ context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	if n := len(r.GetContainerRequests()); n > maxRequests {
		return nil, status.Errorf(codes.InvalidArgument, "%s: %d containers in one call, want at most %d", e.resource, n, maxRequests)
	}
	seen := map[string]bool{}
	for _, c := range r.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			if seen[id] {
				return nil, status.Errorf(codes.InvalidArgument, "%s: device %+.80q is asked for twice", e.resource, id)
			}
			seen[id] = true
		}
	}
	e.gate.RLock()
	defer e.gate.RUnlock()
	o, _ := e.now()
	out, err := o.allocateAll(r.GetContainerRequests())
	if err == nil {
		err = e.gate.free(seen)
	}
	if err == nil {
		err = e.gate.unclaimed(seen)
	}
	if err != nil {
		e.log.Error("devices were refused", "error", err)
		return nil, status.Errorf(codes.FailedPrecondition, "%s: %v", e.resource, err)
	}
	e.gate.handOuts.add(o, seen)
	for _, c := range r.GetContainerRequests() {
		e.log.Info("devices were allocated", "devices", c.GetDevicesIds())
		e.count.allocated(o, c.GetDevicesIds())
	}
	return out, nil
}

// PreStartContainer comes before each start of a container, also when it starts again: the devices have been in the pod for long. So it
// changes nothing and only refuses to start a container whose device has gone.
func (e *endpoint) PreStartContainer(_ context.Context, r *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse,
	error) {
	o, _ := e.now()
	for _, id := range r.GetDevicesIds() {
		if err := o.present(id); err != nil {
			e.log.Error("a container may not start", "error", err)
			return nil, status.Errorf(codes.FailedPrecondition, "%s: %v", e.resource, err)
		}
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}
