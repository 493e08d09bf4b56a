// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/poddevices"
)

// maxWait is the maximum time to wait for an expected event. The tests do not measure the speed of the client, so this timeout may be long.
const maxWait = 30 * time.Second

// fakeKubelet is a server of the PodResources API. The server uses the gRPC library.
type fakeKubelet struct {
	api.UnimplementedPodResourcesListerServer
	Kubelet
	mu    sync.Mutex
	asked []string // the methods that were called
	third func()   // called before the third call is answered
	// get and list return the response to a call, given the number of earlier calls.
	get  func(n int, r *api.GetPodResourcesRequest) (*api.PodResources, error)
	list func(n int) ([]*api.PodResources, error)
	// The field allocatable is the list of devices that GetAllocatableResources returns.
	allocatable []*api.ContainerDevices
}

func (k *fakeKubelet) count(method string) (before int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, m := range k.asked {
		if m == method {
			before++
		}
	}
	if k.asked = append(k.asked, method); len(k.asked) == 3 && k.third != nil {
		k.third()
	}
	return before
}

func (k *fakeKubelet) questions() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]string(nil), k.asked...)
}

func (k *fakeKubelet) Get(ctx context.Context, r *api.GetPodResourcesRequest) (*api.GetPodResourcesResponse, error) {
	n := k.count("Get")
	if k.get == nil {
		return k.UnimplementedPodResourcesListerServer.Get(ctx, r)
	}
	p, err := k.get(n, r)
	return &api.GetPodResourcesResponse{PodResources: p}, err
}

func (k *fakeKubelet) List(context.Context, *api.ListPodResourcesRequest) (*api.ListPodResourcesResponse, error) {
	pods, err := k.list(k.count("List"))
	return &api.ListPodResourcesResponse{PodResources: pods}, err
}

func (k *fakeKubelet) GetAllocatableResources(
	context.Context, *api.AllocatableResourcesRequest,
) (*api.AllocatableResourcesResponse, error) {
	return &api.AllocatableResourcesResponse{Devices: k.allocatable, CpuIds: []int64{1, 2}}, nil
}

// newRoot creates an empty root folder for a kubelet, short enough for unix sockets, and returns the kubelet's paths.
func newRoot(t testing.TB) Kubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "pr")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, sub := range []string{"pod-resources", "device-plugins"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return At(dir)
}

func listen(t testing.TB, k Kubelet) net.Listener {
	t.Helper()
	l, err := net.Listen("unix", k.Socket)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func startServer(t testing.TB, k *fakeKubelet, options ...grpc.ServerOption) *fakeKubelet {
	t.Helper()
	if k.Socket == "" {
		k.Kubelet = newRoot(t)
	}
	server := grpc.NewServer(options...)
	api.RegisterPodResourcesListerServer(server, k)
	l := listen(t, k.Kubelet)
	go server.Serve(l)
	t.Cleanup(server.Stop)
	return k
}

// ask calls Ask for the pod web-0 with a long deadline.
func ask(t testing.TB, k Kubelet, uid string) ([]poddevices.Device, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	return Ask(ctx, k, "shop", "web-0", uid)
}

// askTwice calls Ask with a context that ends during the third call.
func askTwice(t testing.TB, k *fakeKubelet, uid string) ([]poddevices.Device, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	k.mu.Lock()
	k.asked, k.third = nil, cancel
	k.mu.Unlock()
	got, err := Ask(ctx, k.Kubelet, "shop", "web-0", uid)
	if asked := len(k.questions()); asked != 3 || !errors.Is(err, context.Canceled) {
		t.Errorf("asked %d times, %v", asked, err)
	}
	return got, err
}

// webPod returns the pod web-0 with devices of the resource example.com/fast in one container.
func webPod(container string, ids ...string) *api.PodResources {
	p := &api.PodResources{Namespace: "shop", Name: "web-0", Containers: []*api.ContainerResources{{Name: container}}}
	if ids != nil {
		p.Containers[0].Devices = []*api.ContainerDevices{{ResourceName: "example.com/fast", DeviceIds: ids}}
	}
	return p
}

func always(p *api.PodResources) func(int, *api.GetPodResourcesRequest) (*api.PodResources, error) {
	return func(int, *api.GetPodResourcesRequest) (*api.PodResources, error) { return p, nil }
}

// webDevices returns the devices that Ask must return for webPod.
func webDevices(container string, ids ...string) (devices []poddevices.Device) {
	for _, id := range ids {
		devices = append(devices, poddevices.Device{Namespace: "shop", Pod: "web-0", Container: container, Resource: "example.com/fast", ID: id})
	}
	return devices
}

// entriesFile is the format of the checkpoint in Kubernetes 1.37.
type entriesFile struct {
	Data struct {
		PodDeviceEntries  []written
		RegisteredDevices map[string][]string
	}
	Checksum uint64
}

type written struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	DeviceIDs     map[int64][]string
	AllocResp     []byte
}

func (k *fakeKubelet) note(t testing.TB, entries ...written) {
	t.Helper()
	if err := os.WriteFile(k.Checkpoint, marshal(t, entries), 0o600); err != nil {
		t.Fatal(err)
	}
}

func marshal(t testing.TB, entries []written) []byte {
	t.Helper()
	f := entriesFile{Checksum: 2715623478}
	f.Data.PodDeviceEntries, f.Data.RegisteredDevices = entries, map[string][]string{"example.com/fast": {"a", "b", "c", "d"}}
	data, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func fast(uid, container string, ids ...string) written {
	return written{uid, container, "example.com/fast", map[int64][]string{0: ids}, []byte(fmt.Sprintf(`{"PodUID":"%s"}`, uid))}
}
