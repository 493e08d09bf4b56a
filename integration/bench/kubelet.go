// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/podlace/podlace/integration/card"
	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// notedPods is how many containers with devices the kubelet's checkpoint has.
const notedPods = 100

// kubelet answers as the kubelet does for pods without devices and those of its checkpoint, with its API and the real gRPC.
type kubelet struct {
	api.UnimplementedPodResourcesListerServer
}

// notedDevice is the device of the container of a pod in the checkpoint.
func notedDevice(pod int) string { return fmt.Sprintf("0000:3b:%02x.%d", 2+pod/8, pod%8) }

// List tells of the pods of the checkpoint.
func (kubelet) List(context.Context, *api.ListPodResourcesRequest) (*api.ListPodResourcesResponse, error) {
	answer := &api.ListPodResourcesResponse{}
	for i := range notedPods {
		answer.PodResources = append(answer.PodResources, &api.PodResources{Namespace: "bench", Name: fmt.Sprint("noted-", i), Containers: []*api.ContainerResources{
			{Name: "app", Devices: []*api.ContainerDevices{{ResourceName: card.Resource, DeviceIds: []string{notedDevice(i)}}}}}})
	}
	return answer, nil
}

func (kubelet) Get(_ context.Context, r *api.GetPodResourcesRequest) (*api.GetPodResourcesResponse, error) {
	return &api.GetPodResourcesResponse{PodResources: &api.PodResources{Namespace: r.PodNamespace, Name: r.PodName,
		Containers: []*api.ContainerResources{{Name: "app", CpuIds: []int64{2, 3}}}}}, nil
}

// serveKubelet serves in a folder that is the kubelet's root.
func serveKubelet(s *stage) (dir string, err error) {
	if dir, err = os.MkdirTemp("", "kl"); err != nil { // the path of a socket is short
		return "", err
	}
	s.Cleanup(func() { _ = os.RemoveAll(dir) })
	for _, sub := range []string{"pod-resources", "device-plugins"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			return "", err
		}
	}
	l, err := net.Listen("unix", filepath.Join(dir, "pod-resources/kubelet.sock"))
	if err != nil {
		return "", err
	}
	if err := writeCheckpoint(filepath.Join(dir, "device-plugins/kubelet_internal_checkpoint")); err != nil {
		return "", errors.Join(err, l.Close())
	}
	server := grpc.NewServer()
	api.RegisterPodResourcesListerServer(server, kubelet{})
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }() // ends with Stop
	s.Cleanup(func() { server.Stop(); <-done })
	return dir, nil
}

// writeCheckpoint writes what the device manager of the kubelet does (pkg/kubelet/cm/devicemanager/checkpoint of Kubernetes).
func writeCheckpoint(path string) error {
	type entry struct {
		PodUID, ContainerName, ResourceName string
		DeviceIDs                           map[int64][]string
		AllocResp                           []byte
	}
	var data struct {
		Data struct {
			PodDeviceEntries  []entry
			RegisteredDevices map[string][]string
		}
		Checksum uint64
	}
	data.Data.RegisteredDevices = map[string][]string{card.Resource: {notedDevice(0)}}
	for i := range notedPods {
		data.Data.PodDeviceEntries = append(data.Data.PodDeviceEntries, entry{fmt.Sprintf("0b2c8a9e-5d0e-4f5e-8d0c-%012d", 1000+i), "app", card.Resource,
			map[int64][]string{0: {notedDevice(i)}}, make([]byte, 250)}) // as long as one with three variables and a file
	}
	text, err := json.Marshal(data)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}
