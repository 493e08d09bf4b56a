// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const gpus = "example.com/gpu"

// gpuPlugin is a second device plugin, with one GPU on each NUMA node and no device files.
type gpuPlugin struct {
	pluginapi.UnimplementedDevicePluginServer
}

func (gpuPlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (gpuPlugin) ListAndWatch(_ *pluginapi.Empty, s grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	var devices []*pluginapi.Device
	for n, id := range []string{"gpu-0", "gpu-1"} {
		devices = append(devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy,
			Topology: &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(n)}}}})
	}
	if err := s.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-s.Context().Done()
	return nil
}

func (gpuPlugin) Allocate(_ context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	a := &pluginapi.AllocateResponse{}
	for range r.ContainerRequests {
		a.ContainerResponses = append(a.ContainerResponses, &pluginapi.ContainerAllocateResponse{})
	}
	return a, nil
}

// runGPUs runs the GPU plugin until the end of the test, and waits until the kubelet has the GPUs.
func runGPUs(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", pluginapi.DevicePluginPath+"gpu.sock")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, gpuPlugin{})
	go server.Serve(l)
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("unix://"+pluginapi.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := pluginapi.NewRegistrationClient(conn).Register(t.Context(),
		&pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: "gpu.sock", ResourceName: gpus}); err != nil {
		t.Fatal(err)
	}
	checkWithin(t, 10*time.Second, "the kubelet has the GPUs", func() error {
		devices, err := allocatableDevices(t, gpus)
		if err == nil && len(devices) != 2 {
			return net.ErrClosed
		}
		return err
	})
}
