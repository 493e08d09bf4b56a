// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// The constants vf0 to vf3 are the PCI addresses of the VFs in the tests.
const (
	vf0, vf1, vf2, vf3 = "0000:11:02.0", "0000:11:02.1", "0000:11:02.2", "0000:11:02.3"

	patience = 20 * time.Second
)

// draLab is a test environment with a DRA driver, a fake kubelet and a fake API server.
type draLab struct {
	testing.TB
	*Driver
	client *fake.Clientset
	sysfs  string
	log    *logBuffer
	adding bool // the journals are those of an ADD that has not finished
}

// logBuffer is a log that a test can read while the driver writes to it.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// newDRALab returns a node whose card has four VFs in one resource. The DRA driver is not running yet.
func newDRALab(t testing.TB, change ...func(*Options)) *draLab {
	t.Helper()
	must(t, os.RemoveAll("/run/podlace"))
	root, err := os.MkdirTemp("", "dra") // socket paths must be short
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(root) })
	l := &draLab{TB: t, client: fake.NewClientset(), sysfs: pcitest.Generate(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 4}), log: &logBuffer{}}
	o := Options{Node: "node-a", Client: l.client, Kubelet: filepath.Join(root, "kubelet"), Claims: filepath.Join(root, "run", "claims"),
		CDI: filepath.Join(root, "cdi"), Sysfs: l.sysfs,
		Log: slog.New(slog.NewTextHandler(l.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	o.Change = func(_ []string, check, change func() error) error {
		if err := check(); err != nil {
			return err
		}
		return change()
	}
	o.InUse, o.Changed = func(string) string { return "" }, func() {}
	for _, f := range change {
		f(&o)
	}
	o.Records = claim.NewCache(o.Claims, o.Kubelet)
	l.Driver = New(o)
	l.updateInventory(pool.Resource{API: pool.DRA}, nil)
	return l
}

// updateInventory passes an inventory to the driver. In this inventory, all VFs of the first PF belong to one resource.
func (l *draLab) updateInventory(r pool.Resource, faults map[string]Fault) {
	l.Helper()
	s, err := pci.Scan(l.sysfs)
	must(l, err)
	r.Prefix, r.Name = "example.com", "fast"
	p := pool.Pool{Name: fast, Resource: &r}
	for _, d := range s.Devices {
		if d.IsVF() && strings.HasPrefix(d.Address.String(), "0000:11:") {
			p.Devices = append(p.Devices, pool.Device{Device: d})
		}
	}
	l.Update(Inventory{Snapshot: s, Pools: []pool.Pool{p}, Faults: faults})
}

func (l *draLab) prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	return l.Driver.prepare(ctx, c, false)
}

// runDriver runs the driver until the test ends or until stop() is called.
func (l *draLab) runDriver() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); l.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	l.Cleanup(stop)
	return stop
}

func (l *draLab) await(what string, so func() bool) {
	l.Helper()
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if so() {
			return
		}
	}
	l.Fatalf("%s: not within %s\n%s", what, patience, l.log)
}

// deviceResult returns an allocation result: the device that the scheduler allocated to a request.
func deviceResult(request, address string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: claim.Driver, Pool: "node-a",
		Device: strings.NewReplacer(":", "-", ".", "-").Replace(address)}
}

// adminResult returns an allocation result with administrative access to the device.
func adminResult(request, address string) resourceapi.DeviceRequestAllocationResult {
	r := deviceResult(request, address)
	r.AdminAccess = new(true)
	return r
}

// newClaim returns an allocated claim that is reserved for the pod <name>-pod.
func newClaim(uid, name string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", UID: types.UID(uid),
		Annotations: map[string]string{resourceapi.PodResourceClaimAnnotation: "nic"}},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name + "-pod", UID: types.UID("pod-" + uid)}}}}
}

func (l *draLab) addClaims(claims ...*resourceapi.ResourceClaim) {
	l.Helper()
	for _, c := range claims {
		must(l, l.client.Tracker().Add(c))
	}
}

// fakeKubelet is a client that calls the driver as a kubelet does. A fakeKubelet uses one version of the DRA API.
type fakeKubelet struct {
	*draLab
	conn     *grpc.ClientConn
	info     *registration.PluginInfo
	v1beta1  bool
	endpoint string
	names    map[string]string // by UID: names of the claims that were prepared
}

// register finds the driver in the kubelet's plugin registry and registers the driver.
func (l *draLab) register(v1beta1 bool) *fakeKubelet {
	l.Helper()
	registry, _ := l.options.socketFolders()
	socket := ""
	l.await("a socket in the registry", func() bool {
		found, _ := filepath.Glob(filepath.Join(registry, "*.sock"))
		if len(found) > 0 {
			socket = found[len(found)-1]
		}
		return socket != ""
	})
	return l.registerAt(socket, v1beta1)
}

func (l *draLab) registerAt(socket string, v1beta1 bool) *fakeKubelet {
	l.Helper()
	k := &fakeKubelet{draLab: l, v1beta1: v1beta1, names: map[string]string{}}
	client := registration.NewRegistrationClient(dial(l, socket))
	info, err := client.GetInfo(l.Context(), &registration.InfoRequest{}, grpc.WaitForReady(true))
	must(l, err)
	_, err = client.NotifyRegistrationStatus(l.Context(), &registration.RegistrationStatus{PluginRegistered: true})
	must(l, err)
	k.info, k.conn, k.endpoint = info, dial(l, info.GetEndpoint()), info.GetEndpoint()
	return k
}

func dial(t testing.TB, socket string) *grpc.ClientConn {
	conn, err := grpc.NewClient("passthrough:///"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		}))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// prepareClaims prepares claims and returns for each "request=device cdi" of its devices, or the error.
func (k *fakeKubelet) prepareClaims(claims ...*resourceapi.ResourceClaim) (answers []string) {
	k.Helper()
	request := &drav1.NodePrepareResourcesRequest{}
	for _, c := range claims {
		request.Claims = append(request.Claims, &drav1.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)})
		k.names[string(c.UID)] = c.Name
	}
	answer, err := k.call(request)
	if err != nil {
		return []string{"failed: " + err.Error()}
	}
	for _, c := range claims {
		one, ok := answer.GetClaims()[string(c.UID)]
		switch {
		case !ok:
			answers = append(answers, "no answer")
		case one.GetError() != "":
			answers = append(answers, one.GetError())
		default:
			var list []string
			for _, d := range one.GetDevices() {
				list = append(list, fmt.Sprintf("%s=%s/%s %s", strings.Join(d.GetRequestNames(), ","), d.GetPoolName(), d.GetDeviceName(),
					strings.Join(d.GetCdiDeviceIds(), ",")))
			}
			answers = append(answers, strings.Join(list, "; "))
		}
	}
	return answers
}

func (k *fakeKubelet) call(request *drav1.NodePrepareResourcesRequest) (*drav1.NodePrepareResourcesResponse, error) {
	if !k.v1beta1 {
		return drav1.NewDRAPluginClient(k.conn).NodePrepareResources(k.Context(), request)
	}
	old := &drav1beta1.NodePrepareResourcesRequest{}
	for _, c := range request.GetClaims() {
		old.Claims = append(old.Claims, &drav1beta1.Claim{Namespace: c.GetNamespace(), Name: c.GetName(), Uid: c.GetUid()})
	}
	answer, err := drav1beta1.NewDRAPluginClient(k.conn).NodePrepareResources(k.Context(), old)
	if err != nil {
		return nil, err
	}
	out := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	for uid, c := range answer.GetClaims() {
		one := &drav1.NodePrepareResourceResponse{Error: c.GetError()}
		for _, d := range c.GetDevices() {
			one.Devices = append(one.Devices, &drav1.Device{RequestNames: d.GetRequestNames(), PoolName: d.GetPoolName(),
				DeviceName: d.GetDeviceName(), CdiDeviceIds: d.GetCdiDeviceIds()})
		}
		out.Claims[uid] = one
	}
	return out, nil
}

// unprepareClaims asks the driver to unprepare claims, and returns the error for each claim, or "".
func (k *fakeKubelet) unprepareClaims(uids ...string) (answers []string) {
	k.Helper()
	request, old := &drav1.NodeUnprepareResourcesRequest{}, &drav1beta1.NodeUnprepareResourcesRequest{}
	for _, uid := range uids {
		request.Claims = append(request.Claims, &drav1.Claim{Namespace: "shop", Name: k.names[uid], Uid: uid})
		old.Claims = append(old.Claims, &drav1beta1.Claim{Namespace: "shop", Name: k.names[uid], Uid: uid})
	}
	if k.v1beta1 {
		answer, err := drav1beta1.NewDRAPluginClient(k.conn).NodeUnprepareResources(k.Context(), old)
		must(k, err)
		for _, uid := range uids {
			answers = append(answers, answer.GetClaims()[uid].GetError())
		}
		return answers
	}
	answer, err := drav1.NewDRAPluginClient(k.conn).NodeUnprepareResources(k.Context(), request)
	must(k, err)
	for _, uid := range uids {
		if _, ok := answer.GetClaims()[uid]; !ok {
			k.Errorf("no answer for claim %s", uid)
		}
		answers = append(answers, answer.GetClaims()[uid].GetError())
	}
	return answers
}

// watchHealth returns the reports of the health stream as "device=status message", sorted by device.
func (k *fakeKubelet) watchHealth() <-chan string {
	k.Helper()
	reports := make(chan string, 100)
	ctx, cancel := context.WithCancel(k.Context())
	k.Cleanup(cancel)
	recv := k.healthStream(ctx)
	go func() {
		defer close(reports)
		for {
			list, err := recv()
			if err != nil {
				return
			}
			slices.Sort(list)
			reports <- strings.Join(list, "; ")
		}
	}()
	return reports
}

func (k *fakeKubelet) healthStream(ctx context.Context) (recv func() ([]string, error)) {
	k.Helper()
	if k.v1beta1 { // for kubelets that support only this version
		stream, err := healthv1alpha1.NewDRAResourceHealthClient(k.conn).NodeWatchResources(ctx, &healthv1alpha1.NodeWatchResourcesRequest{})
		must(k, err)
		return func() (list []string, err error) {
			answer, err := stream.Recv()
			for _, d := range answer.GetDevices() {
				list = append(list, strings.TrimSpace(d.GetDevice().GetDeviceName()+"="+d.GetHealth().String()+" "+d.GetMessage()))
			}
			return list, err
		}
	}
	stream, err := health.NewDRAResourceHealthClient(k.conn).NodeWatchResources(ctx, &health.NodeWatchResourcesRequest{})
	must(k, err)
	return func() (list []string, err error) {
		answer, err := stream.Recv()
		for _, d := range answer.GetDevices() {
			list = append(list, strings.TrimSpace(d.GetDevice().GetDeviceName()+"="+d.GetHealth().String()+" "+d.GetMessage()))
		}
		return list, err
	}
}

func (l *draLab) fileNames(folder string) string {
	l.Helper()
	found, _ := os.ReadDir(folder)
	var names []string
	for _, f := range found {
		names = append(names, f.Name())
	}
	return strings.Join(names, " ")
}

func (l *draLab) driverOf(address string) string {
	l.Helper()
	a, err := pci.ParseAddress(address)
	must(l, err)
	d, _, err := pci.Read(l.sysfs, a)
	must(l, err)
	return d.Driver
}

// repeatInventory passes the same inventory as newDRALab to the driver.
func (l *draLab) repeatInventory() { l.Helper(); l.updateInventory(pool.Resource{API: pool.DRA}, nil) }

func (l *draLab) setFault(address, text string) {
	l.Helper()
	l.updateInventory(pool.Resource{API: pool.DRA}, map[string]Fault{address: {Kind: LinkDown, Text: text}})
}

// preparedLab returns a lab in which a driver has prepared the claim shop/web with vf0 and ended.
func preparedLab(t *testing.T) *draLab {
	t.Helper()
	l := newDRALab(t)
	stop := l.runDriver()
	k := l.register(false)
	c := newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(c)
	k.prepareClaims(c)
	stop()
	return l
}
