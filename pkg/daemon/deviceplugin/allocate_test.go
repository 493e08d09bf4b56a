// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

// poolOfKinds returns a pool with one device of each kind, which differ in environment variables or device files.
func poolOfKinds() pool.Pool {
	p := vfPool(5)
	p.Name = "example.com/fast-net"
	d := p.Devices
	d[0].Info = map[string]string{"zone": "a"}
	d[1].Driver, d[1].IOMMUGroup = "vfio-pci", 42
	d[2].Driver, d[2].IOMMUGroup, d[2].NoIOMMU = "vfio-pci", 7, true
	d[3].Driver, d[3].UIO = "uio_pci_generic", []string{"uio3"}
	d[4].Driver, d[4].Device.RDMA, d[4].RDMAFiles = "mlx5_core", []string{"mlx5_4"},
		[]string{"infiniband/issm4", "infiniband/rdma_cm", "infiniband/umad4", "infiniband/uverbs4"}
	d[4].RDMA, d[4].VhostNet = true, true
	d[4].PF, _ = pci.ParseAddress("0000:0f:00.0")
	return p
}

func idsOf(p pool.Pool) (ids []string) {
	for _, d := range p.Devices {
		ids = append(ids, d.Address.String())
	}
	return ids
}

// TestAllocate checks that a container gets the environment variables and device files of sriov-network-device-plugin.
func TestAllocate(t *testing.T) {
	p := poolOfKinds()
	ids := idsOf(p)
	dir := t.TempDir()
	o := newOffer(p, &pci.Snapshot{}, deviceGrant{pool.CDIOff, deviceFolders{info: dir}}, nil, nil)
	shuffled := slices.Clone(ids)
	slices.Reverse(shuffled)
	got, err := o.allocate(shuffled)
	if err != nil {
		t.Fatal(err)
	}
	if v := got.GetEnvs()["PCIDEVICE_EXAMPLE_COM_FAST-NET"]; v != strings.Join(ids, ",") {
		t.Errorf("devices %s", v)
	}
	const want = `{"0000:10:00.0":{"extra":{"zone":"a"},"generic":{"deviceID":"0000:10:00.0"}},` +
		`"0000:10:00.1":{"generic":{"deviceID":"0000:10:00.1"},"vfio":{"dev-mount":"/dev/vfio/42","mount":"/dev/vfio/vfio"}},` +
		`"0000:10:00.2":{"generic":{"deviceID":"0000:10:00.2"},"vfio":{"dev-mount":"/dev/vfio/7","mount":"/dev/vfio/vfio"}},` +
		`"0000:10:00.3":{"generic":{"deviceID":"0000:10:00.3"},"uio":{"mount":"/dev/uio3"}},` +
		`"0000:10:00.4":{"generic":{"deviceID":"0000:10:00.4"},"rdma":{"issm":"/dev/infiniband/issm4","rdma_cm":"/dev/infiniband/rdma_cm",` +
		`"rdma_dev":"mlx5_4","umad":"/dev/infiniband/umad4","uverbs":"/dev/infiniband/uverbs4"},"vhost":{"net-mount":"/dev/vhost-net","tun-mount":"/dev/net/tun"}}}`
	if v := got.GetEnvs()["PCIDEVICE_EXAMPLE_COM_FAST-NET_INFO"]; v != want {
		t.Errorf("got\n%s, want\n%s", v, want)
	}
	var paths []string
	for _, d := range got.GetDevices() {
		if d.GetPermissions() != "rw" {
			t.Errorf("device file %v", d)
		}
		path := d.GetContainerPath()
		if d.GetHostPath() != path {
			path = d.GetHostPath() + ":" + path
		}
		paths = append(paths, path)
	}
	if list := strings.Join(paths, " "); list != "/dev/infiniband/issm4 /dev/infiniband/rdma_cm /dev/infiniband/umad4 /dev/infiniband/uverbs4 /dev/net/tun "+
		"/dev/uio3 /dev/vfio/42 /dev/vfio/noiommu-7:/dev/vfio/7 /dev/vfio/vfio /dev/vhost-net" {
		t.Errorf("device files %s", list)
	}
	data, err := os.ReadFile(filepath.Join(dir, "example.com-fast-net-0000:10:00.4-device.json"))
	const info = `{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:10:00.4","vhost-net":"/dev/vhost-net","rdma-device":"mlx5_4","pf-pci-address":"0000:0f:00.0"}}`
	if string(data) != info || err != nil {
		t.Errorf("device-info file %s, %v", data, err)
	}
}

// TestCDI checks that all three CDI modes select the same devices, whose files are in the resource's CDI specification.
func TestCDI(t *testing.T) {
	p := poolOfKinds()
	ids := idsOf(p)[:3] // the first device has no files
	for mode, want := range map[pool.CDI]string{
		pool.CDIField:      "example.com/net-pci=0000:10:00.1 example.com/net-pci=0000:10:00.2",
		pool.CDIAnnotation: "cdi.k8s.io/podlace_0000-10-00.1 example.com/net-pci=0000:10:00.1,example.com/net-pci=0000:10:00.2",
	} {
		got, err := newOffer(p, &pci.Snapshot{}, deviceGrant{cdi: mode}, nil, nil).allocate(ids)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, d := range got.GetCdiDevices() {
			names = append(names, d.GetName())
		}
		for k, v := range got.GetAnnotations() {
			names = append(names, k, v)
		}
		if strings.Join(names, " ") != want || len(got.GetDevices()) > 0 {
			t.Errorf("%s: %q, %v", mode, names, got.GetDevices())
		}
	}
}

// TestCDIFiles checks that each current resource has a CDI specification, and that of a removed one keeps the devices that pods still
// have.
func TestCDIFiles(t *testing.T) {
	p, dir := poolOfKinds(), t.TempDir()
	other := vfPool(1) // no device files, so no CDI device
	other.Name = "example.com/plain"
	f := deviceFolders{cdi: dir}
	write(t, filepath.Join(dir, "podlace-example.com_gone.json"), "{}")
	write(t, filepath.Join(dir, "vendor.json"), "{}")
	if err := f.publish([]pool.Pool{p, other}, nil); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(left) != 2 || filepath.Base(left[0]) != "podlace-example.com_fast-net.json" {
		t.Errorf("files %q", left)
	}
	data, err := os.ReadFile(left[0])
	var spec cdi.Spec
	if err == nil {
		err = json.Unmarshal(data, &spec)
	}
	if err != nil || spec.Kind != "example.com/net-pci" || len(spec.Devices) != 4 || spec.Devices[0].Name != "0000:10:00.1" ||
		len(spec.Devices[0].ContainerEdits.DeviceNodes) != 2 || spec.Devices[0].ContainerEdits.DeviceNodes[0].Path != "/dev/vfio/42" ||
		spec.Devices[1].ContainerEdits.DeviceNodes[0].HostPath != "/dev/vfio/noiommu-7" {
		t.Errorf("%v\n%s", err, data)
	}
	if err := f.publish([]pool.Pool{{Name: p.Name}}, map[string][]poddevices.Device{p.Name: {{ID: "0000:10:00.1"}}}); err != nil {
		t.Fatal(err)
	}
	data, err = os.ReadFile(left[0])
	var less cdi.Spec
	if err == nil {
		err = json.Unmarshal(data, &less)
	}
	if diff := cmp.Diff(spec.Devices[:1], less.Devices); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if got := f.hasCDI(); !got {
		t.Error("the specification of another vendor is not seen")
	}
	os.Remove(filepath.Join(dir, "vendor.json"))
	write(t, filepath.Join(f.cdi, "sriov.podlace.io_metadata_c-1_a.json"), "{}")
	if got := f.hasCDI(); got {
		t.Error("our own specifications count")
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestHostileRequests checks that an invalid request results in an error about the device, or in a list of offered devices only.
func TestHostileRequests(t *testing.T) {
	e := newEndpoint(fast, offering(vfPool(8)), quiet(), newCounters(), newGate("", "/nonexistent", ""))
	long := strings.Repeat("A", 1<<20)
	for _, id := range []string{"", "x", "0000:10:00.9", "0000:10:01.0", "../../etc", "0000:10:00.0\n", "\x00", long,
		"0000:10:00.0,0000:10:00.1"} {
		_, err := e.Allocate(t.Context(), allocating(id))
		if status.Code(err) != codes.FailedPrecondition || len(err.Error()) > 500 || strings.ContainsAny(err.Error(), "\x00\n") {
			t.Errorf("%.40q: %v", id, err)
		}
		if _, err := e.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: []string{id}}); err == nil {
			t.Errorf("%.40q: a container may start", id)
		}
	}
	const id = "0000:10:00.0"
	for _, r := range []*pluginapi.AllocateRequest{nil, {}, {ContainerRequests: []*pluginapi.ContainerAllocateRequest{nil}}} {
		if _, err := e.Allocate(t.Context(), r); err != nil {
			t.Error(err)
		}
	}
	for _, size := range []int32{-1 << 31, -1, 0, 1, 8, 9, 1<<31 - 1} {
		r := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{nil,
			{AvailableDeviceIDs: append(idsOf(vfPool(8)), "x", id, long), MustIncludeDeviceIDs: []string{"y", id}, AllocationSize: size}}}
		got, err := e.GetPreferredAllocation(t.Context(), r)
		if err != nil || len(got.GetContainerResponses()) != 2 {
			t.Errorf("size %d: %v, %v", size, got, err)
		}
	}
}

// podGrants is the devices of each pod. As the kubelet does, the test admits one pod at a time.
type podGrants struct {
	client pluginapi.DevicePluginClient
	mu     sync.Mutex
	free   map[string]bool
	owner  map[string]int // pod by device
	nodes  map[string]int // NUMA node by device
}

func (g *podGrants) admit(ctx context.Context, pod, size int) ([]string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var available []string
	count := map[int]int{}
	for id := range g.free {
		available = append(available, id)
		count[g.nodes[id]]++
	}
	if len(available) < size {
		return nil, nil
	}
	got, err := g.client.GetPreferredAllocation(ctx,
		&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: available, AllocationSize: int32(size)}}})
	if err != nil {
		return nil, err
	}
	ids := got.GetContainerResponses()[0].GetDeviceIDs()
	on := map[int]bool{}
	for _, id := range ids {
		if !g.free[id] {
			return nil, fmt.Errorf("pod %d gets %s, which pod %d has", pod, id, g.owner[id])
		}
		delete(g.free, id)
		g.owner[id], on[g.nodes[id]] = pod, true
	}
	if len(ids) != size || len(on) > 1 && max(count[0], count[1]) >= size {
		return nil, fmt.Errorf("pod %d wants %d and gets %d on %d nodes, free %v", pod, size, len(ids), len(on), count)
	}
	_, err = g.client.Allocate(ctx, allocating(ids...))
	return ids, err
}

func (g *podGrants) release(ids []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, id := range ids {
		g.free[id] = true
	}
}

// TestNoDoubleGrant simulates a kubelet that assigns and frees devices as fast as possible. None may be assigned twice, and those of a
// container must come from one NUMA node if it has enough.
func TestNoDoubleGrant(t *testing.T) {
	k := newFakeKubelet(t)
	p := vfPool(256)
	runEndpoint(t, k.folder(), offering(p))
	k.start()
	client := k.await(fast, "watched", watched).client
	g := podGrants{client: client, free: map[string]bool{}, owner: map[string]int{}, nodes: map[string]int{}}
	for _, d := range p.Devices {
		g.free[d.Address.String()], g.nodes[d.Address.String()] = true, d.NUMANode
	}
	var tasks sync.WaitGroup
	for worker := range 8 {
		tasks.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(worker)))
			var mine [][]string
			for i := range 250 {
				ids, err := g.admit(t.Context(), worker*1000+i, 1<<random.IntN(4))
				if err != nil {
					t.Error(err)
					return
				}
				mine = append(mine, ids)
				if len(mine) > 6 {
					g.release(mine[0])
					mine = mine[1:]
				}
			}
		})
	}
	tasks.Wait()
}
