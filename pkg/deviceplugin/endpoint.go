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

// maxRequests is the largest number of containers in one call. The kubelet sends one.
const maxRequests = 128

// endpoint serves the device plugin API for one resource. It sends each update of the offer to all streams.
type endpoint struct {
	pluginapi.UnimplementedDevicePluginServer
	resource string
	log      *slog.Logger
	count    counters
	gate     *gate

	mu      sync.Mutex
	offer   *offer
	changed chan struct{} // closed when offer is replaced
	streams int
	leaving bool // DRA takes over the devices
}

func newEndpoint(resource string, first *offer, log *slog.Logger, count counters, g *gate) *endpoint {
	return &endpoint{resource: resource, log: log.With("resource", resource), count: count, gate: g, offer: first,
		changed: make(chan struct{})}
}

// update replaces the offer. A stream that is busy sends only the latest offer afterwards.
func (e *endpoint) update(o *offer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.offer = o
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *endpoint) current() (o *offer, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.offer, e.changed
}

// streamCount returns the number of ListAndWatch streams.
func (e *endpoint) streamCount() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.streams
}

func (e *endpoint) stream(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.streams += n
}

// options returns the options for Register and GetDevicePluginOptions. The kubelet uses one of them, depending on the kind of
// registration.
//
// A pod may request a resource in its limits and get the devices by a claim. The kubelet, at least up to 1.37, refuses to start the
// containers of this pod while an endpoint of the resource requires PreStartContainer, because the pod has no device of that endpoint.
func (e *endpoint) options() *pluginapi.DevicePluginOptions {
	e.mu.Lock()
	defer e.mu.Unlock()
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: !e.leaving}
}

// GetDevicePluginOptions returns the optional calls that the endpoint supports.
func (e *endpoint) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return e.options(), nil
}

// ListAndWatch sends all devices at once, and again after each change.
func (e *endpoint) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	e.stream(1)
	defer e.stream(-1)
	e.log.Info("the kubelet watches the resource")
	var sent *offer
	for {
		o, changed := e.current()
		if sent == nil || !o.equal(sent) {
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: o.devices}); err != nil {
				return err
			}
			sent = o
		}
		select {
		case <-stream.Context().Done():
			e.log.Info("the kubelet stopped watching the resource")
			return nil
		case <-changed:
		}
	}
}

// GetPreferredAllocation never fails, because an error would fail the pod. In doubt it returns the available devices in order.
func (e *endpoint) GetPreferredAllocation(_ context.Context,
	r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	o, _ := e.current()
	start := time.Now()
	defer func() { e.count.preferred.WithLabelValues(e.resource).Observe(time.Since(start).Seconds()) }()
	out := &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids := pool.Prefer(o.policy(), o.topology, c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		out.ContainerResponses = append(out.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return out, nil
}

// Allocate returns what a container needs to use the devices. It fails, and with it the pod, if a device is requested twice or is
// missing.
func (e *endpoint) Allocate(_ context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	if n := len(r.GetContainerRequests()); n > maxRequests {
		return nil, status.Errorf(codes.InvalidArgument, "%s: %d containers in one call, want at most %d", e.resource, n, maxRequests)
	}
	seen := map[string]bool{}
	for _, c := range r.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			if seen[id] {
				return nil, status.Errorf(codes.InvalidArgument, "%s: device %+.80q is requested twice", e.resource, id)
			}
			seen[id] = true
		}
	}
	e.gate.RLock()
	defer e.gate.RUnlock()
	o, _ := e.current()
	out, err := o.allocateAll(r.GetContainerRequests())
	if err == nil {
		err = e.gate.checkFree(seen)
	}
	if err == nil {
		err = e.gate.checkUnclaimed(seen)
	}
	if err != nil {
		e.log.Error("refused to allocate devices", "error", err)
		return nil, status.Errorf(codes.FailedPrecondition, "%s: %v", e.resource, err)
	}
	e.gate.allocations.add(o, seen)
	for _, c := range r.GetContainerRequests() {
		e.log.Info("devices were allocated", "devices", c.GetDevicesIds())
		e.count.allocated(o, c.GetDevicesIds())
	}
	return out, nil
}

// PreStartContainer refuses to start a container whose device is missing. It changes nothing, because the kubelet also calls it for
// restarts, when the pod already has its devices.
func (e *endpoint) PreStartContainer(_ context.Context, r *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse,
	error) {
	o, _ := e.current()
	for _, id := range r.GetDevicesIds() {
		if err := o.present(id); err != nil {
			e.log.Error("refused to start a container", "error", err)
			return nil, status.Errorf(codes.FailedPrecondition, "%s: %v", e.resource, err)
		}
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}
