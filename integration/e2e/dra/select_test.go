// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// TestClasses: each DeviceClass of `podlace sriov classes` selects only devices of its resource, which get its settings.
func TestClasses(t *testing.T) {
	l := newLab(t, setup{config: `{"resourceList": [
		{"resourceName": "fast", "resourcePrefix": "example.com", "api": "dra", "selectors": {"pfNames": ["ens0f0"]}, "vf": {"mtu": 1400}},
		{"resourceName": "slow", "resourcePrefix": "example.com", "api": "dra", "selectors": {"pfNames": ["ens1f0"]}}]}`})
	classes, err := l.podlace("classes")
	if err != nil {
		t.Fatalf("%v: %s", err, classes)
	}
	l.create(classes)
	l.template("none", "nic") // the selector of l.class also matches resource fast
	for i, class := range []string{"fast.example.com", "slow.example.com"} {
		name, kind := strings.Split(class, ".")[0], "{exactly: {deviceClassName: "+class+"}, name: nic}"
		l.create("{kind: ResourceClaim, metadata: {name: " + name + "}, spec: {devices: {requests: [" + kind + "]}}}")
		l.pod(name, "nic="+name)
		l.runs(name)
		ids := l.allocated(name)
		if l.pfOf(ids[0]) != []string{pf0, pf1}[i] {
			t.Errorf("class %s: VF %s", class, ids[0])
		}
		l.attached(name, ids...)
		if mtu := l.inside(name)["net1"].MTU; (mtu == 1400) != (i == 0) {
			t.Errorf("class %s: the VF has MTU %d", class, mtu)
		}
	}
}

// inside returns a pod's interfaces by name.
func (l *lab) inside(pod string) map[string]iface {
	l.Helper()
	s, _ := l.sandboxOf(pod)
	all, err := interfaces(s.netns)
	if err != nil {
		l.Fatal(err)
	}
	named := map[string]iface{}
	for _, i := range all {
		named[i.Name] = i
	}
	return named
}

// TestSelectors: claims select VFs by attributes, including attributes that some devices do not have.
func TestSelectors(t *testing.T) {
	l := newLab(t, setup{})
	const of = `device.attributes["sriov.podlace.io"]`
	for i, c := range []struct {
		cel  string
		want []string // one of these
	}{
		{of + `.numa == 1`, l.ids[4:]},
		{`device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1) == 0`, l.ids[:4]},
		{of + `.pf == "ens1f0" && ` + of + `.vf == 2`, l.ids[6:7]},
		{`device.attributes["resource.kubernetes.io"].pciBusID == "` + l.ids[3] + `"`, l.ids[3:4]},
		{of + `.pfAddress == "` + pf1 + `" && ` + of + `.vendor == "8086" && ` + of + `.driver == "iavf" && ` + of + `.linkType == "ether"`,
			l.ids[4:]},
		{of + `.vf == 9`, nil},
	} {
		name := fmt.Sprint("vf-", i)
		l.create(`
kind: ResourceClaim
metadata: {name: ` + name + `}
spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: ` + l.class() + `, selectors: [{cel: {expression:
  '` + c.cel + `'}}]}}]}}`)
		l.pod(name, "nic="+name)
		if c.want == nil {
			l.event(name, "cannot allocate all claims")
			continue
		}
		l.runs(name)
		ids := l.allocated(name)
		if len(ids) != 1 || !slices.Contains(c.want, ids[0]) {
			t.Errorf("%s: %v: want one of %v", c.cel, ids, c.want)
		}
		l.attached(name, ids...)
		l.delete(name)
	}
}

// TestDistinctPF: two VFs have different PFs or the same PF if the claim requires it.
func TestDistinctPF(t *testing.T) {
	needGate(t, "DRAConsumableCapacity")
	l := newLab(t, setup{})
	for constraint, want := range map[string]int{"distinctAttribute": 2, "matchAttribute": 1} {
		name := strings.ToLower(constraint)
		l.create(`
kind: ResourceClaim
metadata: {name: ` + name + `}
spec:
  devices:
    requests: [` + l.exactly("west", "east") + `]
    constraints: [{` + constraint + `: sriov.podlace.io/pf}]`)
		l.pod(name, "nics="+name)
		l.runs(name)
		ids, pfs := l.allocated(name), map[string]bool{}
		for _, id := range ids {
			pfs[l.pfOf(id)] = true
		}
		if len(ids) != 2 || len(pfs) != want {
			t.Errorf("%s: %v: want %d PFs", constraint, ids, want)
		}
		l.attached(name, ids...)
	}
}

// TestFirstAvailable: a request gets the first available alternative. A configuration for the request applies to each of them.
func TestFirstAvailable(t *testing.T) {
	l := newLab(t, setup{})
	l.create(`
kind: ResourceClaim
metadata: {name: vf}
spec:
  devices:
    requests:
    - name: nic
      firstAvailable:
      - {name: best, deviceClassName: ` + l.class() + `, selectors: [{cel: {expression:
          'device.attributes["sriov.podlace.io"].numa == 7'}}]}
      - {name: next, deviceClassName: ` + l.class() + `, selectors: [{cel: {expression:
          'device.attributes["sriov.podlace.io"].numa == 1'}}]}
    config:
    - requests: [nic]
      opaque: {driver: sriov.podlace.io, parameters: {apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, mtu: 1300}}
    - requests: [nic/best]
      opaque: {driver: sriov.podlace.io, parameters: {apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, mtu: 1200}}
`)
	l.pod("web", "nic=vf")
	l.runs("web")
	ids := l.allocated("vf")
	if l.numaOf(ids[0]) != "1" {
		t.Errorf("the claim has %v", ids)
	}
	l.attached("web", ids...)
	if mtu := l.inside("web")["net1"].MTU; mtu != 1300 {
		t.Errorf("the VF has MTU %d: want that of the request's configuration", mtu)
	}
}

// stub simulates another vendor's DRA driver, whose devices are CPUs.
type stub struct{}

const stubDriver = "cpu.example.com"

func (stub) PrepareResourceClaims(_ context.Context,
	claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, c := range claims {
		r := kubeletplugin.PrepareResult{}
		for _, d := range c.Status.Allocation.Devices.Results {
			if d.Driver == stubDriver {
				r.Devices = append(r.Devices, kubeletplugin.Device{Requests: []string{d.Request}, PoolName: d.Pool, DeviceName: d.Device})
			}
		}
		results[c.UID] = r
	}
	return results, nil
}

func (stub) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, c := range claims {
		results[c.UID] = nil
	}
	return results, nil
}

func (stub) HandleError(context.Context, error, string) {}

func (stub) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// startStub registers the stub with the kubelet. The stub offers one CPU device on each NUMA node.
func (l *lab) startStub() {
	l.Helper()
	data := filepath.Join(kubeletRoot, "plugins", stubDriver)
	if err := os.MkdirAll(data, 0o750); err != nil {
		l.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	helper, err := kubeletplugin.Start(ctx, stub{}, kubeletplugin.DriverName(stubDriver), kubeletplugin.KubeClient(l.client),
		kubeletplugin.NodeName(nodeName), kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.HealthService(false))
	if err != nil {
		l.Fatal(err)
	}
	l.last = append(l.last, func() { helper.Stop(); cancel() }) // the kubelet needs this driver to unprepare claims
	l.create(`
kind: ResourceSlice
metadata: {name: ` + l.ns + `-cpus}
spec:
  driver: ` + stubDriver + `
  nodeName: ` + nodeName + `
  pool: {name: ` + nodeName + `, generation: 1, resourceSliceCount: 1}
  devices:
  - {name: cpus-0, attributes: {resource.kubernetes.io/numaNode: {int: 0}}}
  - {name: cpus-1, attributes: {resource.kubernetes.io/numaNode: {int: 1}}}
---
kind: DeviceClass
metadata: {name: ` + l.ns + `-cpus}
spec: {selectors: [{cel: {expression: 'device.driver == "` + stubDriver + `"'}}]}
`)
	within(l.T, "the kubelet knows the stub", func() error {
		if s := helper.RegistrationStatus(); s == nil || !s.PluginRegistered {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// TestMatchNUMA: for CPUs of another driver and two VFs on one NUMA node, the scheduler chooses the one with enough free devices.
func TestMatchNUMA(t *testing.T) {
	l := newLab(t, setup{})
	l.startStub()
	want := map[string]string{}
	for i, selector := range []string{"cpus-1", "cpus-0"} {
		name := fmt.Sprint("pod-", i)
		l.create(`
kind: ResourceClaim
metadata: {name: ` + name + `}
spec:
  devices:
    requests:
    - {name: cpus, exactly: {deviceClassName: ` + l.ns + `-cpus, selectors: [{cel: {expression:
        'device.attributes["resource.kubernetes.io"].numaNode == ` + strings.TrimPrefix(selector, "cpus-") + `'}}]}}
    - ` + strings.ReplaceAll(l.exactly("west", "east"), "}}, {", "}}\n    - {") + `
    constraints: [{matchAttribute: resource.kubernetes.io/numaNode}]`)
		l.pod(name, "all="+name)
		l.runs(name)
		ids := l.allocated(name)
		l.attached(name, ids...)
		for _, id := range ids {
			want[id] = strings.TrimPrefix(selector, "cpus-")
		}
	}
	for _, id := range slices.Sorted(maps.Keys(want)) {
		if l.numaOf(id) != want[id] {
			t.Errorf("VF %s is on NUMA node %s: want %s", id, l.numaOf(id), want[id])
		}
	}
	if len(want) != 4 {
		t.Errorf("the pods have %v", want)
	}
}
