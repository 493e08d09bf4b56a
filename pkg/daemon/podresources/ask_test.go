// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/poddevices"
)

// richPod returns a pod that uses every feature that the PodResources API can describe.
func richPod() *api.PodResources {
	numa := func(n int64) *api.TopologyInfo { return &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: n}}} }
	share := "s"
	return &api.PodResources{Namespace: "shop", Name: "web-0", CpuIds: []int64{9},
		Memory: []*api.ContainerMemory{{MemoryType: "memory", Size: 1 << 40, Topology: numa(1)}},
		Containers: []*api.ContainerResources{
			{Name: "proxy", CpuIds: []int64{3, 200, -1}, Memory: []*api.ContainerMemory{{MemoryType: "hugepages-1Gi", Size: 1 << 30}}},
			{Name: "app", CpuIds: []int64{1 << 40}, Devices: []*api.ContainerDevices{
				{ResourceName: "example.com/fast", DeviceIds: []string{"0000:3b:10.2", "0000:3b:10.1"}, Topology: numa(0)},
				{ResourceName: "example.com/fast", DeviceIds: []string{"0000:af:10.1"}, Topology: numa(1)},
				{ResourceName: "example.com/none"}, {ResourceName: "example.com/gpu", DeviceIds: []string{"x"}}},
				DynamicResources: []*api.DynamicResource{{ClaimName: "c", ClaimNamespace: "shop", ClaimResources: []*api.ClaimResource{
					{CdiDevices: []*api.CDIDevice{{Name: "v/c=d"}}, DriverName: "d", PoolName: "p", DeviceName: "n", ShareId: &share}}}}},
		}}
}

func richDevices() []poddevices.Device {
	d := func(resource, id string, numa ...int) poddevices.Device {
		return poddevices.Device{Namespace: "shop", Pod: "web-0", Container: "app", Index: 1, Resource: "example.com/" + resource, ID: id,
			NUMA: numa, CPUs: []int64{1 << 40}}
	}
	return []poddevices.Device{d("fast", "0000:3b:10.2", 0), d("fast", "0000:3b:10.1", 0), d("fast", "0000:af:10.1", 1), d("gpu", "x")}
}

func TestAsk(t *testing.T) {
	pods := map[string]*api.PodResources{"shop/web-0": richPod(),
		"shop/web-1":  {Namespace: "shop", Name: "web-1", Containers: []*api.ContainerResources{{Name: "app"}}},
		"other/web-0": webPod("app", "other")}
	k := startServer(t, &fakeKubelet{get: func(_ int, r *api.GetPodResourcesRequest) (*api.PodResources, error) {
		return pods[r.GetPodNamespace()+"/"+r.GetPodName()], nil
	}})
	got, err := ask(t, k.Kubelet, "")
	if diff := cmp.Diff(richDevices(), got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	k.note(t)
	if got, err := Ask(t.Context(), k.Kubelet, "shop", "web-1", after); len(got) != 0 || err != nil {
		t.Errorf("a pod without devices: %v, %v", got, err)
	}
	k.Resources = []string{"example.com/gpu"}
	if got, err := ask(t, k.Kubelet, ""); err != nil || !cmp.Equal(got, richDevices()[3:]) {
		t.Errorf("%v, %v", got, err)
	}
}

// TestResponses checks a response that is larger than the default limit of gRPC, and responses without the pod.
func TestResponses(t *testing.T) {
	id := strings.Repeat("x", 15<<20) // more than the default of gRPC
	k := startServer(t, &fakeKubelet{get: always(webPod("app", "before", id, "after"))})
	if got, err := ask(t, k.Kubelet, ""); err != nil || len(got) != 3 || got[1].ID != id || got[2].ID != "after" {
		t.Errorf("%d devices, %v", len(got), err)
	}
	for name, p := range map[string]*api.PodResources{"no bytes": nil, "another": {Namespace: "shop", Name: "web-1"},
		"another namespace": {Namespace: "pub", Name: "web-0"}} {
		k := startServer(t, &fakeKubelet{get: always(p)})
		if got, err := ask(t, k.Kubelet, ""); !errors.Is(err, ErrUnknownPod) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// TestErrors checks that Ask does not retry after a permanent error, and that its error contains the code and the text of the kubelet's.
func TestErrors(t *testing.T) {
	for _, text := range []string{"", "100% of\nüber \x7f"} {
		k := startServer(t, &fakeKubelet{get: func(int, *api.GetPodResourcesRequest) (*api.PodResources, error) {
			return nil, status.Error(codes.PermissionDenied, text)
		}})
		want := "ask the kubelet at " + k.Socket + " which devices pod shop/web-0 has: Get: rpc error: code = PermissionDenied desc = " + text
		if _, err := ask(t, k.Kubelet, "u"); err == nil || err.Error() != want {
			t.Errorf("want %.200s, got %.200v", want, err)
		}
		if asked := k.questions(); len(asked) != 1 {
			t.Errorf("asked %q", asked)
		}
	}
}

// notFound returns the error that kubelets up to 1.37 return for an unknown pod.
func notFound(_ int, r *api.GetPodResourcesRequest) (*api.PodResources, error) {
	return nil, fmt.Errorf("pod %s in namespace %s not found", r.GetPodName(), r.GetPodNamespace())
}

// TestUnknownPod checks that Ask returns ErrUnknownPod for an unknown pod, without a retry.
func TestUnknownPod(t *testing.T) {
	none := func(int) ([]*api.PodResources, error) {
		return []*api.PodResources{{Namespace: "shop", Name: "web-1"}}, nil
	}
	for name, k := range map[string]*fakeKubelet{"Get": {get: notFound}, "List": {list: none},
		"by code": {get: func(int, *api.GetPodResourcesRequest) (*api.PodResources, error) {
			return nil, status.Error(codes.NotFound, "no")
		}}} {
		startServer(t, k)
		if got, err := ask(t, k.Kubelet, "u"); !errors.Is(err, ErrUnknownPod) || got != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if asked := k.questions(); asked[len(asked)-1] != "List" && len(asked) != 1 || len(asked) > 2 {
			t.Errorf("%s: asked %q", name, asked)
		}
	}
}

// TestOlder checks that Ask uses List if the kubelet lacks Get or has disabled it, and keeps to it after a temporary error.
func TestOlder(t *testing.T) {
	list := func(n int) ([]*api.PodResources, error) {
		if n == 0 {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		other := webPod("app", "c")
		other.Namespace = "pub"
		return []*api.PodResources{{Namespace: "shop", Name: "web-1"}, other, webPod("app", "a", "b"), {Namespace: "shop", Name: "web-2"}}, nil
	}
	disabled := func(int, *api.GetPodResourcesRequest) (*api.PodResources, error) {
		return nil, errors.New("PodResources API Get method disabled")
	}
	for name, k := range map[string]*fakeKubelet{"unimplemented": {list: list}, "disabled": {list: list, get: disabled}} {
		startServer(t, k)
		if got, err := ask(t, k.Kubelet, ""); err != nil || !cmp.Equal(got, webDevices("app", "a", "b")) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if asked := k.questions(); !cmp.Equal(asked, []string{"Get", "List", "List"}) {
			t.Errorf("%s: asked %q", name, asked)
		}
	}
}

// TestBusy has a kubelet that allows a burst of ten calls and then 50 per second, as 80 pods start at the same time. All must get their
// devices after retries. Without pauses, the client would make several times the allowed number of calls, which fails the test.
func TestBusy(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	began, answered, refused := time.Now(), 0, 0
	limit := func(ctx context.Context, r any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		mu.Lock()
		defer mu.Unlock()
		if answered >= 10+int(time.Since(began)/(20*time.Millisecond)) {
			refused++
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		answered++
		return handle(ctx, r)
	}
	k := startServer(t, &fakeKubelet{get: always(webPod("app", "a"))}, grpc.UnaryInterceptor(limit))
	const pods = 80
	var all sync.WaitGroup
	for range pods {
		all.Go(func() {
			if got, err := ask(t, k.Kubelet, ""); err != nil || !cmp.Equal(got, webDevices("app", "a")) {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
	all.Wait()
	// A pause lasts at least half of its maximum: 10, 20, 40, 80, 160 and 320 ms, and then 500 ms each.
	took := time.Since(began)
	if most := pods * (7 + int(took/(longestPause/2))); answered+refused > most {
		t.Errorf("%d calls in %s, want at most %d: the retries have no pauses", answered+refused, took, most)
	}
	t.Logf("%d calls, %d refused, in %s", answered+refused, refused, took)
}

// TestJitter checks that the pause before a retry is random, and lasts at least half of the maximum.
func TestJitter(t *testing.T) {
	drawn := map[time.Duration]bool{}
	for range 100 {
		d := jitter(longestPause)
		if drawn[d] = true; d < longestPause/2 || d > longestPause {
			t.Errorf("got %s", d)
		}
	}
	if len(drawn) < 50 {
		t.Errorf("%d pauses of a hundred differ", len(drawn))
	}
}

// TestNoKubelet checks that Ask returns errNoKubelet at once on a node without a kubelet, but waits for one that restarts.
func TestNoKubelet(t *testing.T) {
	k := newRoot(t)
	if err := os.Remove(filepath.Dir(k.Socket)); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(t, k, "u"); !errors.Is(err, errNoKubelet) || !strings.Contains(err.Error(), filepath.Dir(k.Socket)) {
		t.Errorf("got %v", err)
	}
}

// TestRestart checks that Ask waits for a kubelet that restarts: first without a socket, then with a stale one.
func TestRestart(t *testing.T) {
	for _, stale := range []bool{false, true} {
		k := &fakeKubelet{Kubelet: newRoot(t), get: always(webPod("app", "a"))}
		if stale {
			l := listen(t, k.Kubelet)
			l.(interface{ SetUnlinkOnClose(bool) }).SetUnlinkOnClose(false)
			l.Close()
		}
		done := make(chan error)
		go func() {
			got, err := ask(t, k.Kubelet, "")
			if err == nil && !cmp.Equal(got, webDevices("app", "a")) {
				err = fmt.Errorf("%v", got)
			}
			done <- err
		}()
		select {
		case err := <-done:
			t.Fatalf("it did not wait: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		os.Remove(k.Socket)
		startServer(t, k)
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// TestTimeUp checks that after the deadline, the error has the reason why the context ended and the last failure before.
func TestTimeUp(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	busy := startServer(t, &fakeKubelet{get: func(n int, _ *api.GetPodResourcesRequest) (*api.PodResources, error) {
		if n > 1 {
			<-hang
		}
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}})
	silent := startServer(t, &fakeKubelet{get: func(int, *api.GetPodResourcesRequest) (*api.PodResources, error) { <-hang; return nil, nil }})
	if _, err := askTwice(t, busy, "u"); err == nil ||
		!strings.Contains(err.Error(), "has: context canceled: Get: rpc error: code = ResourceExhausted desc = rejected by rate limit") {
		t.Errorf("got %v", err)
	}
	for says, k := range map[string]Kubelet{"connect: no such file": newRoot(t), "code = DeadlineExceeded": silent.Kubelet} {
		err := askUntilUp(t, k, says)
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errNoKubelet) || !strings.Contains(err.Error(), says) ||
			!strings.HasPrefix(err.Error(), "ask the kubelet at "+k.Socket+" which devices pod shop/web-0 has: context deadline exceeded: ") {
			t.Errorf("%s: got %v", says, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := Ask(ctx, silent.Kubelet, "shop", "web-0", "u"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// askUntilUp calls Ask with a deadline and returns its error, like untilUp.
func askUntilUp(t *testing.T, k Kubelet, says string) error {
	return untilUp(t, says, func(ctx context.Context) error { _, err := Ask(ctx, k, "shop", "web-0", "u"); return err })
}

// untilUp calls the function with a deadline, which it doubles up to maxWait until the error contains `says`, because the first call
// may take long on a slow machine.
func untilUp(t *testing.T, says string, call func(context.Context) error) error {
	t.Helper()
	for wait := 300 * time.Millisecond; ; wait *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		err := call(ctx)
		cancel()
		if err == nil || strings.Contains(err.Error(), says) || wait > maxWait {
			return err
		}
	}
}

// lateContext is a context whose deadline has expired when the client retries, but which ends only 50 ms after the client has read it.
type lateContext struct {
	context.Context
	end    context.CancelFunc
	passed atomic.Bool
}

// Deadline returns no deadline before the kubelet has refused the first call, and then one in the past.
func (l *lateContext) Deadline() (time.Time, bool) {
	if !l.passed.Load() {
		return time.Time{}, false
	}
	time.AfterFunc(50*time.Millisecond, l.end)
	return time.Unix(1, 0), true
}

// Err returns the error of an expired deadline (context.DeadlineExceeded).
func (l *lateContext) Err() error {
	if l.Context.Err() != nil {
		return context.DeadlineExceeded
	}
	return nil
}

// TestLate checks that the error of Ask has the reason why the kubelet refused the first call. The second fails because of an expired
// deadline, a moment before the context reports its end, and its error must not replace the first.
func TestLate(t *testing.T) {
	t.Parallel()
	ctx := &lateContext{}
	ctx.Context, ctx.end = context.WithCancel(t.Context())
	defer ctx.end()
	busy := startServer(t, &fakeKubelet{get: func(int, *api.GetPodResourcesRequest) (*api.PodResources, error) {
		ctx.passed.Store(true)
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}})
	_, err := Ask(ctx, busy.Kubelet, "shop", "web-0", "u")
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "rejected by rate limit") {
		t.Errorf("got %v", err)
	}
	if asked := busy.questions(); len(asked) != 1 {
		t.Errorf("asked %q: the second connection did not see the deadline", asked)
	}
}

// TestForeign checks that Ask fails at its deadline if another program serves the kubelet's socket, or if the socket's folder is a
// file.
func TestForeign(t *testing.T) {
	k := newRoot(t)
	l := listen(t, k)
	defer l.Close()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
			c.Close()
		}
	}()
	none := k
	none.Socket = k.Checkpoint + "/kubelet.sock"
	if err := os.WriteFile(k.Checkpoint, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for says, k := range map[string]Kubelet{"error reading server preface": k, "not a directory": none} {
		if err := askUntilUp(t, k, says); err == nil || !strings.Contains(err.Error(), says) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", says, err)
		}
	}
}
