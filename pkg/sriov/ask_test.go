// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
)

// fakeKubelet is a kubelet that runs the pod shop/web-0.
type fakeKubelet struct {
	api.UnimplementedPodResourcesListerServer
	containers []*api.ContainerResources
	busy       int // number of calls to refuse because of the rate limit
}

func (k *fakeKubelet) Get(_ context.Context, r *api.GetPodResourcesRequest) (*api.GetPodResourcesResponse, error) {
	if k.busy--; k.busy >= 0 {
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	if r.PodNamespace != "shop" || r.PodName != "web-0" {
		return nil, status.Errorf(codes.NotFound, "pod %s in namespace %s not found", r.PodName, r.PodNamespace)
	}
	return &api.GetPodResourcesResponse{PodResources: &api.PodResources{Namespace: "shop", Name: "web-0", Containers: k.containers}}, nil
}

func (k *fakeKubelet) serveSocket(t testing.TB) (dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "kl")
	must(t, err, os.Mkdir(filepath.Join(dir, "pod-resources"), 0o755))
	l, err := net.Listen("unix", filepath.Join(dir, "pod-resources/kubelet.sock"))
	must(t, err)
	server := grpc.NewServer()
	api.RegisterPodResourcesListerServer(server, k)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() { server.Stop(); <-done; os.RemoveAll(dir) })
	return dir
}

func writeCheckpoint(t *testing.T, dir, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(dir, "device-plugins"), 0o755),
		os.WriteFile(filepath.Join(dir, "device-plugins/kubelet_internal_checkpoint"), []byte(text), 0o600))
}

func checkpointOf(entries ...string) string {
	return `{"Data":{"PodDeviceEntries":[` + strings.Join(entries, ",") + `],"RegisteredDevices":{}},"Checksum":1}`
}

// checkpointEntry returns the entry of a device of the test resource.
func checkpointEntry(uid, id string) string {
	return `{"PodUID":"` + uid + `","ContainerName":"app","ResourceName":"` + fast + `","DeviceIDs":{"0":["` + id + `"]},"AllocResp":""}`
}

func container(name string, devices ...string) *api.ContainerResources {
	c := &api.ContainerResources{Name: name}
	for i := 0; i < len(devices); i += 2 {
		c.Devices = append(c.Devices, &api.ContainerDevices{ResourceName: devices[i], DeviceIds: []string{devices[i+1]}})
	}
	return c
}

// TestDaemonStopped: without the device plugin, ADD gets the same devices from the kubelet, even while that limits the request rate.
func TestDaemonStopped(t *testing.T) {
	l := newLab(t)
	k := &fakeKubelet{busy: 2, containers: []*api.ContainerResources{
		container("a", slow, vf2, "example.com/gpu", "GPU-0"), container("b", slow, vf1, fast, vf0)}}
	dir := k.serveSocket(t)
	l.Conf = l.Conf.With("kubeletDir", dir)
	must(t, os.Remove(l.sriov.socket)) // first there is no socket; then it refuses connections, as after a crash
	a := l.add("a")
	if i := a.result.Interfaces; len(i) != 4 || i[1].PciID != vf2 || i[2].PciID != vf0 || i[3].PciID != vf1 {
		t.Errorf("%s", a.prev)
	}
	l.OK(a.check())
	l.del("a")
	k.containers = []*api.ContainerResources{container("a", "example.com/gpu", "GPU-0"), container("b")}
	writeCheckpoint(t, dir, checkpointOf())
	if a := l.add("a", "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=new"); len(a.result.Interfaces) != 1 {
		t.Errorf("%s", a.prev)
	}
	l.Fails(l.Call("ADD", "a", "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1"), plugin.CodeTryAgain,
		"the kubelet does not know the pod")
}

// TestOtherPod: the kubelet may list an earlier or a later pod of the same name. Its devices are used only if the device plugin refuses
// and the checkpoint confirms that they belong to the pod's UID.
func TestOtherPod(t *testing.T) {
	l := newLab(t)
	l.allocate(vf1)
	k := &fakeKubelet{containers: []*api.ContainerResources{container("app", fast, vf2)}}
	dir := k.serveSocket(t)
	keys := []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=new"}
	for _, c := range []struct {
		checkpoint, want string
		unsure           bool
	}{
		{checkpointOf(checkpointEntry("new", vf2), checkpointEntry("old", vf1)), vf2, true},
		{checkpointOf(checkpointEntry("new", vf1), checkpointEntry("old", vf2)), vf1, false},
	} {
		*l.refusal = poddevices.Answer{}
		if c.unsure {
			*l.refusal = poddevices.Answer{Error: "the list is of another pod"}
		}
		writeCheckpoint(t, dir, c.checkpoint)
		a := l.add("a", keys...)
		if i := a.result.Interfaces; len(i) != 2 || i[1].PciID != c.want {
			t.Errorf("%s: want %s", a.prev, c.want)
		}
		l.del("a", keys...)
	}
}
