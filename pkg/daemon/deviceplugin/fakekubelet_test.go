// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// maxWait limits the wait for an expected event. It is generous, because the tests do not measure speed.
const maxWait = 30 * time.Second

// fakeKubelet is the kubelet's side of the device plugin API, with real sockets. It deletes all sockets at its start, accepts
// registrations and watches the endpoints.
type fakeKubelet struct {
	pluginapi.UnimplementedRegistrationServer
	podresources.UnimplementedPodResourcesListerServer
	t        *testing.T
	dir      string // folder device-plugins
	versions []string
	server   *grpc.Server
	stop     context.CancelFunc
	ctx      context.Context

	mu      sync.Mutex
	news    *sync.Cond
	plugins map[string]*registeredPlugin // by resource
	pods    []*podresources.PodResources
	getOff  bool // PodResources does not support Get
	busy    int  // number of calls to refuse
	limited bool // PodResources serves 100 calls a second with bursts of 10
	began   time.Time
	told    map[string]int // served calls, by method of PodResources
}

// registeredPlugin is an endpoint that has registered.
type registeredPlugin struct {
	conn    *grpc.ClientConn
	options *pluginapi.DevicePluginOptions
	client  pluginapi.DevicePluginClient
	lists   int
	devices map[string]*pluginapi.Device
	ended   bool
	sock    string
}

func newFakeKubelet(t *testing.T) *fakeKubelet {
	k := &fakeKubelet{t: t, dir: filepath.Join(shortDir(t), "device-plugins"), versions: []string{"v1beta1"}}
	k.news = sync.NewCond(&k.mu)
	if err := os.Mkdir(k.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.kill)
	return k
}

// shortDir returns a temporary folder whose path is short enough for unix sockets.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "dp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (k *fakeKubelet) folder() kubeletDirs { return kubeletDirs{Plugins: k.dir} }

// start deletes all sockets and listens, as the kubelet does.
func (k *fakeKubelet) start() {
	k.t.Helper()
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 {
			if err := os.Remove(filepath.Join(k.dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) { // already deleted
				k.t.Fatal(err)
			}
		}
	}
	l, err := net.Listen("unix", filepath.Join(k.dir, "kubelet.sock"))
	if err != nil {
		k.t.Fatal(err)
	}
	k.mu.Lock()
	k.plugins = map[string]*registeredPlugin{}
	k.mu.Unlock()
	k.ctx, k.stop = context.WithCancel(context.Background())
	k.server = grpc.NewServer()
	pluginapi.RegisterRegistrationServer(k.server, k)
	podresources.RegisterPodResourcesListerServer(k.server, k)
	go k.server.Serve(l)
	pods := filepath.Join(filepath.Dir(k.dir), "pod-resources")
	if _, err := os.Stat(pods); err != nil {
		return
	}
	path := filepath.Join(pods, "kubelet.sock")
	os.Remove(path)
	l, err = net.Listen("unix", path)
	if err != nil {
		k.t.Fatal(err)
	}
	go k.server.Serve(l)
}

// kill ends the fake kubelet without cleanup, as SIGKILL would. Its socket file remains.
func (k *fakeKubelet) kill() {
	if k.server == nil {
		return
	}
	k.stop()
	k.server.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.plugins {
		p.conn.Close()
	}
	k.server = nil
}

// Register calls ListAndWatch of the registering endpoint, as the kubelet does.
func (k *fakeKubelet) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	known := false
	for _, v := range k.versions {
		known = known || v == r.GetVersion()
	}
	if !known {
		return nil, fmt.Errorf("requested API version %q is not supported by kubelet", r.GetVersion())
	}
	path := filepath.Join(k.dir, r.GetEndpoint())
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.plugins[r.GetResourceName()]; old != nil && old.sock == path && !old.ended {
		return nil, errors.New("already connected")
	}
	conn, err := dial(path)
	if err != nil {
		return nil, err
	}
	p := &registeredPlugin{conn: conn, client: pluginapi.NewDevicePluginClient(conn), options: r.GetOptions(), sock: path}
	k.plugins[r.GetResourceName()] = p
	go k.watch(k.ctx, p)
	return &pluginapi.Empty{}, nil
}

func (k *fakeKubelet) watch(ctx context.Context, p *registeredPlugin) {
	stream, err := p.client.ListAndWatch(ctx, &pluginapi.Empty{})
	for err == nil {
		var list *pluginapi.ListAndWatchResponse
		if list, err = stream.Recv(); err != nil {
			break
		}
		k.mu.Lock()
		p.lists++
		p.devices = map[string]*pluginapi.Device{}
		for _, d := range list.GetDevices() {
			p.devices[d.GetID()] = d
		}
		k.news.Broadcast()
		k.mu.Unlock()
	}
	k.mu.Lock()
	p.ended = true
	k.news.Broadcast()
	k.mu.Unlock()
}

// await waits until `ok` returns true for the endpoint of a resource.
func (k *fakeKubelet) await(resource, what string, ok func(*registeredPlugin) bool) *registeredPlugin {
	k.t.Helper()
	timer := time.AfterFunc(maxWait, func() { k.mu.Lock(); k.news.Broadcast(); k.mu.Unlock() })
	defer timer.Stop()
	until := time.Now().Add(maxWait)
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		if p := k.plugins[resource]; p != nil && p.lists > 0 && ok(p) {
			return p
		}
		if time.Now().After(until) {
			k.t.Fatalf("%s: never %s: %+v", resource, what, k.plugins[resource])
		}
		k.news.Wait()
	}
}

// limitRate makes the fake kubelet count the calls of PodResources and limit their rate, as the kubelet does.
func (k *fakeKubelet) limitRate() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.limited, k.began, k.told = true, time.Now(), map[string]int{}
}

// admitCall returns an error if the rate limit refuses the call.
func (k *fakeKubelet) admitCall(method string) error {
	if k.limited && k.told["List"]+k.told["Get"] >= 10+int(time.Since(k.began)/(10*time.Millisecond)) {
		return status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	if k.busy > 0 && method == "List" {
		k.busy--
		return status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	if k.limited {
		k.told[method]++
	}
	return nil
}

func (k *fakeKubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.admitCall("List"); err != nil {
		return nil, err
	}
	return &podresources.ListPodResourcesResponse{PodResources: k.pods}, nil
}

func (k *fakeKubelet) Get(_ context.Context, r *podresources.GetPodResourcesRequest) (*podresources.GetPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.admitCall("Get"); err != nil {
		return nil, err
	}
	if k.getOff {
		return nil, errors.New("PodResources API Get method disabled")
	}
	for _, p := range k.pods {
		if p.GetName() == r.GetPodName() && p.GetNamespace() == r.GetPodNamespace() {
			return &podresources.GetPodResourcesResponse{PodResources: p}, nil
		}
	}
	return nil, fmt.Errorf("pod %s in namespace %s not found", r.GetPodName(), r.GetPodNamespace())
}

// GetAllocatableResources returns the devices and CPUs of all pods, and one more CPU.
func (k *fakeKubelet) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (
	*podresources.AllocatableResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	answer := &podresources.AllocatableResourcesResponse{CpuIds: []int64{15}}
	for _, p := range k.pods {
		for _, c := range p.GetContainers() {
			answer.CpuIds, answer.Devices = append(answer.CpuIds, c.GetCpuIds()...), append(answer.Devices, c.GetDevices()...)
		}
	}
	return answer, nil
}

// assignDevices adds a container with these devices to the kubelet's list.
func (k *fakeKubelet) assignDevices(namespace, pod, container, resource string, ids ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = append(k.pods, &podresources.PodResources{Name: pod, Namespace: namespace, Containers: []*podresources.ContainerResources{
		{Name: container, CpuIds: []int64{16, 17}, Devices: []*podresources.ContainerDevices{{ResourceName: resource, DeviceIds: ids}}}}})
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func (k *fakeKubelet) release() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = nil
}
