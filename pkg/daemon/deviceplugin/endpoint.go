// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/pkg/daemon/pool"
)

// endpoint serves the device plugin API for one resource, and sends each change of its devices to all open ListAndWatch streams.
type endpoint struct {
	pluginapi.UnimplementedDevicePluginServer
	resource string
	log      *slog.Logger
	count    eventCounters
	gate     *allocationGate

	streams atomic.Int32 // ListAndWatch streams
	leaving atomic.Bool  // DRA takes over the devices

	mu      sync.Mutex
	offer   *resourceOffer
	changed chan struct{} // closed when offer is replaced
}

func newEndpoint(resource string, first *resourceOffer, log *slog.Logger, count eventCounters, g *allocationGate) *endpoint {
	return &endpoint{resource: resource, log: log.With("resource", resource), count: count, gate: g, offer: first,
		changed: make(chan struct{})}
}

// update replaces the offered devices. A stream that is busy meanwhile then sends only the latest list.
func (e *endpoint) update(o *resourceOffer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.offer = o
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *endpoint) current() (o *resourceOffer, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.offer, e.changed
}

// pluginOptions returns the endpoint's options, for Register or GetDevicePluginOptions.
//
// While a resource moves to DRA, a pod may request it in its limits but get the devices through a claim. The kubelet (at least up to
// 1.37) refuses to start the pod's containers if an endpoint that assigned it no device requires PreStartContainer.
func (e *endpoint) pluginOptions() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: !e.leaving.Load()}
}

// GetDevicePluginOptions returns the optional calls that the endpoint supports.
func (e *endpoint) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return e.pluginOptions(), nil
}

// ListAndWatch sends the list of all devices when a stream starts and after each change.
func (e *endpoint) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	e.streams.Add(1)
	defer e.streams.Add(-1)
	e.log.Info("the kubelet watches the resource")
	var sent *resourceOffer
	for {
		o, changed := e.current()
		if sent == nil || !o.equalTo(sent) {
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

// GetPreferredAllocation returns any of the available devices if it cannot compute a preference. It never fails, because an error would
// fail the pod.
func (e *endpoint) GetPreferredAllocation(_ context.Context,
	r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	o, _ := e.current()
	start := time.Now()
	defer func() { e.count.preferred.WithLabelValues(e.resource).Observe(time.Since(start).Seconds()) }()
	out := &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids := pool.Prefer(o.allocationPolicy(), o.topology, c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		out.ContainerResponses = append(out.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return out, nil
}

// Allocate returns the settings with which a container can use the devices. It fails, and the pod does not start, if a device is
// missing, being changed or claimed.
func (e *endpoint) Allocate(_ context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	wanted := map[string]bool{}
	for _, c := range r.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			wanted[id] = true
		}
	}
	e.gate.RLock()
	defer e.gate.RUnlock()
	o, _ := e.current()
	out, err := o.allocateAll(r.GetContainerRequests())
	if err == nil {
		err = e.gate.checkFree(wanted)
	}
	if err == nil {
		err = e.gate.checkUnclaimed(wanted)
	}
	if err != nil {
		e.log.Error("refused to allocate devices", "error", err)
		return nil, status.Errorf(codes.FailedPrecondition, "%s: %v", e.resource, err)
	}
	e.gate.allocations.addPending(o, wanted)
	for _, c := range r.GetContainerRequests() {
		e.log.Info("devices were allocated", "devices", c.GetDevicesIds())
		e.count.countAllocated(o, c.GetDevicesIds())
	}
	return out, nil
}

// PreStartContainer returns an error if a device of the container is missing, and changes nothing. The kubelet also calls it before it
// restarts a container that already has its devices.
func (e *endpoint) PreStartContainer(_ context.Context, r *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse,
	error) {
	o, _ := e.current()
	for _, id := range r.GetDevicesIds() {
		if err := o.checkPresent(id); err != nil {
			e.log.Error("refused to start a container", "error", err)
			return nil, status.Errorf(codes.FailedPrecondition, "%s: %v", e.resource, err)
		}
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}
