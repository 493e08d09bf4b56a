// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const resourceName = "example.com/vf"

// What a plugin answers to GetPreferredAllocation: nothing as it does not offer the call, the first devices by number, all but one of those it
// should, or all that are offered.
const (
	silent  = "silent"
	lowest  = "lowest"
	toofew  = "too few"
	toomany = "too many"
)

// plugin is a device plugin as the device manager sees it behind the socket.
type plugin struct {
	kind  string
	asked []question
}

func (p *plugin) API() pluginapi.DevicePluginClient { return p }
func (p *plugin) Resource() string                  { return resourceName }
func (p *plugin) SocketPath() string                { return "vf.sock" }

// GetDevicePluginOptions says whether the plugin has preferences.
func (p *plugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty, ...grpc.CallOption) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: p.kind != silent}, nil
}

// ListAndWatch is never called: the lists are handed to the device manager directly.
func (p *plugin) ListAndWatch(context.Context, *pluginapi.Empty, ...grpc.CallOption) (grpc.ServerStreamingClient[pluginapi.ListAndWatchResponse], error) {
	return nil, errors.New("not here")
}

// GetPreferredAllocation notes the question.
func (p *plugin) GetPreferredAllocation(_ context.Context, r *pluginapi.PreferredAllocationRequest, _ ...grpc.CallOption) (*pluginapi.PreferredAllocationResponse, error) {
	c := r.ContainerRequests[0]
	q := question{numbers(c.AvailableDeviceIDs), numbers(c.MustIncludeDeviceIDs), int(c.AllocationSize)}
	p.asked = append(p.asked, q)
	answer := &pluginapi.ContainerPreferredAllocationResponse{}
	for _, i := range p.prefer(q) {
		answer.DeviceIDs = append(answer.DeviceIDs, id(i))
	}
	return &pluginapi.PreferredAllocationResponse{ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{answer}}, nil
}

func (p *plugin) prefer(q question) []int {
	rest := slices.DeleteFunc(slices.Clone(q.Available), func(i int) bool { return slices.Contains(q.Must, i) })
	all := slices.Concat(q.Must, rest)
	switch p.kind {
	case lowest:
		return all[:q.Size]
	case toofew:
		return all[:q.Size-1]
	}
	return all
}

// Allocate says yes.
func (p *plugin) Allocate(context.Context, *pluginapi.AllocateRequest, ...grpc.CallOption) (*pluginapi.AllocateResponse, error) {
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{{}}}, nil
}

// PreStartContainer is never called.
func (p *plugin) PreStartContainer(context.Context, *pluginapi.PreStartContainerRequest, ...grpc.CallOption) (*pluginapi.PreStartContainerResponse, error) {
	return nil, errors.New("not here")
}

func id(device int) string { return fmt.Sprintf("d%02d", device) }

// numbers turns IDs back, sorted.
func numbers(ids []string) []int {
	out := make([]int, len(ids))
	for i, id := range ids {
		out[i], _ = strconv.Atoi(id[1:])
	}
	slices.Sort(out)
	return out
}
