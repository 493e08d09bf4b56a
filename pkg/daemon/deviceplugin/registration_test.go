// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/daemon/watch"
	"github.com/podlace/podlace/pkg/pci"
)

const fast = "example.com/fast"

// vfPool returns a pool of n VFs that starts at 0000:10:00.0. The first half of the VFs is on NUMA node 0.
func vfPool(n int) pool.Pool {
	p := pool.Pool{Name: fast, Resource: &pool.Resource{Policy: pool.NUMABestFit}}
	for i := range n {
		a, err := pci.ParseAddress(fmt.Sprintf("0000:%02x:%02x.%x", 0x10+i/256, i/8%32, i%8))
		if err != nil {
			panic(err)
		}
		node := i * 2 / n
		p.Devices = append(p.Devices, pool.Device{Topology: []int{node},
			Device: pci.Device{Address: a, VFIndex: i, NUMANode: node, Driver: "iavf", IOMMUGroup: pci.Unknown}})
	}
	return p
}

func offering(p pool.Pool) *resourceOffer {
	s := &pci.Snapshot{Nodes: []pci.Node{{ID: 0, Distance: []int{10, 20}}, {ID: 1, Distance: []int{20, 10}}}}
	for _, d := range p.Devices {
		s.Devices = append(s.Devices, d.Device)
	}
	return newOffer(p, s, deviceGrant{cdi: pool.CDIOff}, nil, nil)
}

// runEndpoint serves an endpoint with a kubelet until the test ends.
func runEndpoint(t *testing.T, k kubeletDirs, o *resourceOffer) *registrar {
	ctx, cancel := context.WithCancel(context.Background())
	changed := make(chan struct{}, 1)
	r := newRegistrar(newEndpoint(fast, o, quiet(), newCounters(), newGate("", "/nonexistent", "")), k, changed)
	go watch.Folder(ctx, r.socketFolder(), func(string) { notify(changed) }, quiet())
	done := make(chan struct{})
	go func() { defer close(done); r.run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

func watched(*registeredPlugin) bool { return true }

// TestKubeletRestarts checks that the kubelet gets the resource with all its devices after each start of the kubelet.
func TestKubeletRestarts(t *testing.T) {
	restarts := 1000
	if testing.Short() {
		restarts = 50
	}
	k := newFakeKubelet(t)
	r := runEndpoint(t, k.folder(), offering(vfPool(8)))
	before := runtime.NumGoroutine()
	for range restarts {
		k.start()
		p := k.await(fast, "watched", watched)
		if len(p.devices) != 8 {
			t.Fatalf("got %d devices", len(p.devices))
		}
		k.kill()
	}
	k.start()
	k.await(fast, "watched", watched)
	for until := time.Now().Add(maxWait); !r.isReady(); {
		if time.Now().After(until) {
			t.Fatal("never ready")
		}
		time.Sleep(time.Millisecond)
	}
	if now := runtime.NumGoroutine(); now > before+30 {
		t.Errorf("%d goroutines, %d before", now, before)
	}
	if sockets, _ := filepath.Glob(filepath.Join(k.dir, "*.sock")); len(sockets) != 2 {
		t.Errorf("sockets %q, want kubelet.sock and one of ours", sockets)
	}
}

// TestUpdates checks that every ListAndWatch stream gets the newest list, that a stalled one does not delay others, and that an update
// is sent only if the devices, their health or their NUMA nodes changed.
func TestUpdates(t *testing.T) {
	k := newFakeKubelet(t)
	p := vfPool(8)
	r := runEndpoint(t, k.folder(), offering(p))
	k.start()
	first := k.await(fast, "watched", watched)
	stuck, err := first.client.ListAndWatch(t.Context(), &pluginapi.Empty{}) // the test does not read from it
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2000 {
		faults := map[string]string{p.Devices[i%8].Address.String(): "broken"}
		r.update(newOffer(p, &pci.Snapshot{}, deviceGrant{}, faults, nil))
	}
	last := map[string]string{p.Devices[6].Address.String(): "broken", p.Devices[7].Address.String(): "broken"}
	r.update(newOffer(p, &pci.Snapshot{}, deviceGrant{}, last, nil))
	k.await(fast, "the last offer arrives", func(at *registeredPlugin) bool {
		for i, d := range p.Devices {
			if (at.devices[d.Address.String()].GetHealth() == pluginapi.Unhealthy) != (i >= 6) {
				return false
			}
		}
		return true
	})
	k.mu.Lock()
	lists := first.lists
	k.mu.Unlock()
	for range 10 {
		again := map[string]string{p.Devices[6].Address.String(): "broken", p.Devices[7].Address.String(): "broken otherwise"}
		r.update(newOffer(p, &pci.Snapshot{}, deviceGrant{}, again, nil))
	}
	r.update(newOffer(p, &pci.Snapshot{}, deviceGrant{}, nil, nil))
	k.await(fast, "healthy", func(at *registeredPlugin) bool {
		return at.devices[p.Devices[7].Address.String()].GetHealth() == pluginapi.Healthy
	})
	k.mu.Lock()
	if first.lists != lists+1 {
		t.Errorf("%d lists for one change", first.lists-lists)
	}
	k.mu.Unlock()
	for last := ""; last != pluginapi.Healthy; { // queued responses first, then the newest
		list, err := stuck.Recv()
		if err != nil {
			t.Fatal(err)
		}
		last = list.GetDevices()[7].GetHealth()
	}
}

// TestLostStream checks that an endpoint registers again, with another socket, if the kubelet has stopped watching the endpoint.
func TestLostStream(t *testing.T) {
	k := newFakeKubelet(t)
	r := runEndpoint(t, k.folder(), offering(vfPool(1)))
	k.start()
	first := k.await(fast, "watched", watched)
	r.mu.Lock()
	r.at = time.Now().Add(-2 * watchTimeout) // beyond the time limit
	r.mu.Unlock()
	first.conn.Close()
	if second := k.await(fast, "watched again", func(p *registeredPlugin) bool { return p != first }); second.sock == first.sock {
		t.Error("the same socket: the kubelet takes it for the connection that it has")
	}
}

// TestSocketRemoved checks that the endpoint recreates a socket that another program deleted.
func TestSocketRemoved(t *testing.T) {
	k := newFakeKubelet(t)
	runEndpoint(t, k.folder(), offering(vfPool(1)))
	k.start()
	first := k.await(fast, "watched", watched)
	if err := os.Remove(first.sock); err != nil {
		t.Fatal(err)
	}
	k.await(fast, "watched by another socket", func(p *registeredPlugin) bool { return p.sock != first.sock })
}

// TestAnotherKubeletSocket has a kubelet with a new registration socket. The endpoint must register with a new path, because the
// kubelet opens no new connection for one that it knows.
func TestAnotherKubeletSocket(t *testing.T) {
	k := newFakeKubelet(t)
	runEndpoint(t, k.folder(), offering(vfPool(1)))
	k.start()
	first := k.await(fast, "watched", watched)
	path := filepath.Join(k.dir, "kubelet.sock")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	go k.server.Serve(l)
	k.await(fast, "watched by another socket", func(p *registeredPlugin) bool { return p.sock != first.sock })
}

// TestFolderComesAndGoes checks that the kubelet's socket folder may be missing at the start, and be removed and created again.
func TestFolderComesAndGoes(t *testing.T) {
	k := newFakeKubelet(t)
	if err := os.RemoveAll(k.dir); err != nil {
		t.Fatal(err)
	}
	runEndpoint(t, k.folder(), offering(vfPool(1)))
	for range 3 {
		time.Sleep(10 * time.Millisecond) // the plugin has checked at least once
		if err := os.Mkdir(k.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		k.start()
		k.await(fast, "watched", watched)
		k.kill()
		// The plugin may create its socket while the kubelet removes all files in the folder.
		for until := time.Now().Add(maxWait); ; {
			err := os.RemoveAll(k.dir)
			if err == nil {
				break
			}
			if !errors.Is(err, syscall.ENOTEMPTY) || time.Now().After(until) {
				t.Fatal(err)
			}
		}
	}
}

// TestRefusedVersion checks that the plugin retries with growing pauses until the kubelet supports its version of the API.
func TestRefusedVersion(t *testing.T) {
	k := newFakeKubelet(t)
	k.versions = []string{"v2"}
	runEndpoint(t, k.folder(), offering(vfPool(1)))
	k.start()
	time.Sleep(300 * time.Millisecond)
	k.kill()
	k.versions = []string{"v1beta1"}
	k.start()
	k.await(fast, "watched", watched)
}

// TestTwoInstances checks that the end of the old instance does not affect a resource. During an update, both instances are registered for
// it.
func TestTwoInstances(t *testing.T) {
	k := newFakeKubelet(t)
	old, stop := context.WithCancel(context.Background())
	e := newEndpoint(fast, offering(vfPool(1)), quiet(), newCounters(), newGate("", "/nonexistent", ""))
	r := newRegistrar(e, k.folder(), make(chan struct{}))
	done := make(chan struct{})
	go func() { defer close(done); r.run(old) }()
	k.start()
	first := k.await(fast, "watched", watched)
	runEndpoint(t, k.folder(), offering(vfPool(2)))
	second := k.await(fast, "watched by the second", func(p *registeredPlugin) bool { return p != first && len(p.devices) == 2 })
	stop()
	<-done
	if _, err := os.Lstat(first.sock); err == nil {
		t.Error("the socket of the first instance is left")
	}
	if _, err := second.client.GetDevicePluginOptions(t.Context(), &pluginapi.Empty{}); err != nil {
		t.Error(err)
	}
}

// TestRegistry checks that the kubelet finds the endpoint through its plugin registry, with the options of Register, and that the
// plugin retries if the kubelet refuses.
func TestRegistry(t *testing.T) {
	dir := shortDir(t)
	r := runEndpoint(t, kubeletDirs{Plugins: filepath.Join(dir, "none"), Registry: dir}, offering(vfPool(1)))
	socket := func(not string) string {
		for until := time.Now().Add(maxWait); time.Now().Before(until); time.Sleep(time.Millisecond) {
			if found, _ := filepath.Glob(filepath.Join(dir, "example*.sock")); len(found) == 1 && found[0] != not {
				return found[0]
			}
		}
		t.Fatal("no socket")
		return ""
	}
	first := socket("")
	ask := func(path string) (registerapi.RegistrationClient, pluginapi.DevicePluginClient) {
		conn, err := dial(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return registerapi.NewRegistrationClient(conn), pluginapi.NewDevicePluginClient(conn)
	}
	kubelet, _ := ask(first)
	info, err := kubelet.GetInfo(t.Context(), &registerapi.InfoRequest{})
	if err != nil || info.GetType() != registerapi.DevicePlugin || info.GetName() != fast || info.GetEndpoint() != first ||
		strings.Join(info.GetSupportedVersions(), ",") != "v1beta1" {
		t.Fatalf("%v, %v", info, err)
	}
	if _, err := kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{Error: "not now"}); err != nil {
		t.Fatal(err)
	}
	second := socket(first)
	kubelet, client := ask(second)
	if _, err := kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	if r.isReady() {
		t.Error("ready although no kubelet watches")
	}
	stream, err := client.ListAndWatch(t.Context(), &pluginapi.Empty{})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil || !r.isReady() {
		t.Errorf("%v, ready %t", err, r.isReady())
	}
	got, err := client.GetDevicePluginOptions(t.Context(), &pluginapi.Empty{})
	if err != nil || !got.GetGetPreferredAllocationAvailable() || !got.GetPreStartRequired() {
		t.Errorf("%v, %v", got, err)
	}
}

// TestStaleSockets checks that the sockets of killed instances are deleted, and the socket of a running instance is kept.
func TestStaleSockets(t *testing.T) {
	k := newFakeKubelet(t)
	alive, stale, foreign := filepath.Join(k.dir, "example.com_fast-00000001.sock"), filepath.Join(k.dir, "example.com_fast-00000002.sock"),
		filepath.Join(k.dir, "example.com_faster-00000002.sock")
	for _, path := range []string{alive, stale, foreign} {
		l, _, err := probes.Listen(path)
		if err != nil {
			t.Fatal(err)
		}
		if path == alive {
			defer l.Close()
		} else {
			l.Close()
		}
	}
	runEndpoint(t, k.folder(), offering(vfPool(1)))
	for until := time.Now().Add(maxWait); ; time.Sleep(time.Millisecond) {
		if _, err := os.Lstat(stale); err != nil {
			break
		}
		if time.Now().After(until) {
			t.Fatal("the stale socket is left")
		}
	}
	for _, path := range []string{alive, foreign} {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
}

// TestSocketName checks that socket names never repeat, and that their paths fit into a socket address.
func TestSocketName(t *testing.T) {
	dir := "/var/lib/kubelet/device-plugins"
	for _, resource := range []string{fast, strings.Repeat("long.", 40) + "com/" + strings.Repeat("x", 63)} {
		a, b := socketName(dir, resource), socketName(dir, resource)
		if a == b || len(filepath.Join(dir, a)) > probes.MaxSocketPath || strings.Contains(a, "/") || !strings.HasSuffix(a, ".sock") {
			t.Errorf("%s and %s", a, b)
		}
	}
}
