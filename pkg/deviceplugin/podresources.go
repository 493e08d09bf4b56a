// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/podresources"
)

const (
	// askTimeout is how long the kubelet may take to tell of its pods.
	askTimeout = 5 * time.Second
	// maxAnswer is how many bytes its answer may have; that of a node with hundreds of pods is larger than gRPC takes by default.
	maxAnswer = 64 << 20
)

// PodResources asks the kubelet which pods have which devices.
type PodResources struct {
	socket string
	conn   *grpc.ClientConn
	client api.PodResourcesListerClient
}

// OpenPodResources returns a client of the socket in a folder, pod-resources below the kubelet's root. The kubelet may be away, and
// come and go.
func OpenPodResources(dir string) (*PodResources, error) {
	socket := filepath.Join(dir, "kubelet.sock")
	conn, err := grpc.NewClient("unix://"+socket, credentials(), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithConnectParams(reconnect()))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", socket, err)
	}
	return &PodResources{socket, conn, api.NewPodResourcesListerClient(conn)}, nil
}

// Close ends the connection.
func (p *PodResources) Close() error { return p.conn.Close() }

// List returns the devices that pods have, of all resources for which want is true, in the order of pods and containers.
func (p *PodResources) List(ctx context.Context, want func(resource string) bool) (held []allocation.Device, err error) {
	var answer *api.ListPodResourcesResponse
	err = p.ask(ctx, func(ctx context.Context) (err error) {
		answer, err = p.client.List(ctx, &api.ListPodResourcesRequest{})
		return err
	})
	for _, pod := range answer.GetPodResources() {
		held = append(held, devicesOf(pod, want)...)
	}
	slices.SortStableFunc(held, func(a, b allocation.Device) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Index, b.Index))
	})
	return held, err
}

// Allocatable returns the devices that the kubelet may give away, by resource: the healthy ones, whether pods have them or not.
func (p *PodResources) Allocatable(ctx context.Context) (devices map[string][]string, err error) {
	var answer *api.AllocatableResourcesResponse
	err = p.ask(ctx, func(ctx context.Context) (err error) {
		answer, err = p.client.GetAllocatableResources(ctx, &api.AllocatableResourcesRequest{})
		return err
	})
	devices = map[string][]string{}
	for _, d := range answer.GetDevices() {
		devices[d.GetResourceName()] = append(devices[d.GetResourceName()], d.GetDeviceIds()...)
	}
	return devices, err
}

// ask repeats a question that came too fast after others, or while the kubelet started. Without a socket there is no kubelet to wait for.
func (p *PodResources) ask(ctx context.Context, question func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for pause := podresources.FirstPause; ; pause = min(2*pause, podresources.LongestPause) {
		err := question(ctx)
		code := status.Code(err)
		if _, there := idOf(p.socket); err == nil || !there || code != codes.ResourceExhausted && code != codes.Unavailable {
			return wrapped(err, p.socket)
		}
		if !podresources.Sleep(ctx, pause) {
			return wrapped(err, p.socket)
		}
	}
}

// credentials are none: the kubelet's sockets are guarded by their folders.
func credentials() grpc.DialOption { return grpc.WithTransportCredentials(insecure.NewCredentials()) }

// reconnect makes a kubelet that was away be found again within a second.
func reconnect() grpc.ConnectParams {
	delays := backoff.DefaultConfig
	delays.BaseDelay, delays.MaxDelay = podresources.FirstPause, podresources.LongestPause
	return grpc.ConnectParams{Backoff: delays, MinConnectTimeout: podresources.LongestPause}
}

func wrapped(err error, socket string) error {
	if err != nil {
		return fmt.Errorf("ask the kubelet at %s: %w", socket, err)
	}
	return nil
}

// devicesOf reads what one pod has. A container's devices of one resource come in several parts, one for each NUMA node.
func devicesOf(pod *api.PodResources, want func(resource string) bool) (held []allocation.Device) {
	for i, c := range pod.GetContainers() {
		for _, d := range c.GetDevices() {
			if !want(d.GetResourceName()) {
				continue
			}
			var nodes []int
			for _, n := range d.GetTopology().GetNodes() {
				nodes = append(nodes, int(n.GetID()))
			}
			for _, id := range d.GetDeviceIds() {
				held = append(held, allocation.Device{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: c.GetName(), Index: i,
					Resource: d.GetResourceName(), ID: id, NUMA: nodes, CPUs: c.GetCpuIds()})
			}
		}
	}
	return held
}
