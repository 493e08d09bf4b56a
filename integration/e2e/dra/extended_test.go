// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/integration/harness/node"
)

const (
	byPlugin = `{"resourceList": [{"resourceName": "fast", "resourcePrefix": "example.com", "selectors": {"vendors": ["8086"]}}]}`
	// "half" offers one PF's VFs by DRA, and the other's by the device plugin API.
	half = `{"resourceList": [
		{"resourceName": "fast", "resourcePrefix": "example.com", "api": "dra", "selectors": {"pfNames": ["ens0f0"]}},
		{"resourceName": "slow", "resourcePrefix": "example.com", "selectors": {"pfNames": ["ens1f0"]}}]}`
)

// extendedClass creates a DeviceClass with this extendedResourceName, so that the scheduler generates claims for pods with limits for the
// resource.
func (l *lab) extendedClass() {
	l.Helper()
	l.create(`
kind: DeviceClass
metadata: {name: ` + l.ns + `-extended}
spec:
  extendedResourceName: ` + resource + `
  selectors: ` + ofResource)
}

// limits creates a pod whose resource limits request n VFs.
func (l *lab) limits(name, resource string, n int) {
	l.Helper()
	l.create(fmt.Sprintf("{kind: Pod, metadata: {name: %s}, spec: {containers: [{resources: {limits: {%s: %d}}}]}}", name, resource, n))
}

// owned returns a pod's VFs in the order of its interfaces, which it recognises by their MACs.
func (l *lab) owned(pod string) (ids []string) {
	l.Helper()
	inside := l.inside(pod)
	for _, name := range slices.Sorted(maps.Keys(inside)) {
		for id, was := range l.before {
			if strings.HasPrefix(name, "net") && was.MAC == inside[name].MAC {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// allocatable returns the number of allocatable devices in the Node's status.
func (l *lab) allocatable(resource string) int64 {
	l.Helper()
	n, err := l.client.CoreV1().Nodes().Get(l.background(), nodeName, metav1.GetOptions{})
	if err != nil {
		l.Fatal(err)
	}
	for name, q := range n.Status.Allocatable {
		if string(name) == resource {
			return q.Value()
		}
	}
	return 0
}

// TestExtended: a pod with limits for a resource that is a DeviceClass's extendedResourceName gets VFs through a claim that the scheduler
// generates.
func TestExtended(t *testing.T) {
	needGate(t, "DRAExtendedResource")
	l := newLab(t, setup{})
	l.extendedClass()
	within(t, "no device plugin offers the resource", func() error {
		if n := l.allocatable(resource); n != 0 {
			return fmt.Errorf("allocatable are %d", n)
		}
		return nil
	})
	l.limits("web", resource, 2)
	p := l.runs("web")
	if s := p.Status.ExtendedResourceClaimStatus; s == nil {
		t.Fatalf("the pod has no claim: %+v", p.Status)
	}
	ids := l.allocated(p.Status.ExtendedResourceClaimStatus.ResourceClaimName)
	slices.Sort(ids)
	if len(ids) != 2 {
		t.Fatalf("the pod has %v", ids)
	}
	l.attached("web", ids...)
	if got := l.variables("web", "app")[variable]; got != strings.Join(ids, ",") {
		t.Errorf("%s=%s: want %v", variable, got, ids)
	}
}

// TestMigrateNode: a node changes from the device plugin API to DRA and back without a drain. Running pods keep their VFs, no VF is offered
// by both, and new pods with the same limits get VFs through the other API.
func TestMigrateNode(t *testing.T) {
	needGate(t, "DRAExtendedResource")
	l := prepare(t, setup{config: byPlugin})
	l.run()
	l.ready()
	l.extendedClass()
	within(t, "the node has all VFs", func() error {
		if n := l.allocatable(resource); n != int64(len(l.ids)) {
			return fmt.Errorf("allocatable are %d", n)
		}
		return nil
	})
	l.limits("before", resource, 1)
	l.runs("before")
	before := l.owned("before")
	l.attached("before", before...)

	l.configure(fast)
	free := slices.DeleteFunc(slices.Clone(l.ids), func(id string) bool { return id == before[0] })
	took := within(t, "the free VFs are in slices", func() error { return l.offers(free...) })
	t.Logf("the free VFs are in slices after %.1f s", took.Seconds())
	took = within(t, "no VF can be allocated by the device plugin", func() error {
		if n := l.allocatable(resource); n != 0 {
			return fmt.Errorf("allocatable are %d", n)
		}
		return nil
	})
	t.Logf("allocatable is 0 after %.1f s more", took.Seconds())
	time.Sleep(time.Second) // the scheduler learns of the change from the API server; the kubelet would reject a pod that is scheduled earlier
	l.limits("during", resource, 7)
	l.runs("during")
	during := l.owned("during")
	l.attached("during", during...)
	l.attached("before", before...)
	if all := slices.Sorted(slices.Values(append(slices.Clone(before), during...))); !slices.Equal(all, l.ids) {
		t.Errorf("the pods have %v and %v", before, during)
	}
	l.delete("before")
	took = within(t, "the last VF is in a slice", func() error { return l.offers(l.ids...) })
	t.Logf("the last VF is in a slice %.1f s after its pod", took.Seconds())

	l.configure(byPlugin)
	took = within(t, "the device plugin offers only the free VF", func() error {
		if n := l.allocatable(resource); n != 1 {
			return fmt.Errorf("allocatable are %d", n)
		}
		return nil
	})
	t.Logf("the device plugin offers the free VF after %.1f s", took.Seconds())
	l.attached("during", during...)
	l.limits("after", resource, 1)
	l.event("after", "Insufficient "+resource) // the scheduler also counts the limits of the pod "during", although its VFs come from a claim
	l.delete("during")
	within(t, "the node has all VFs", func() error {
		if n := l.allocatable(resource); n != int64(len(l.ids)) {
			return fmt.Errorf("allocatable are %d", n)
		}
		return nil
	})
	l.runs("after")
	l.attached("after", l.owned("after")...)
	if n := len(l.owned("after")); n != 1 {
		t.Errorf("pod after has %d VFs", n)
	}
}

// TestStaticStays: static pods, which cannot have claims, get VFs through the device plugin API of a daemon that also serves claims.
func TestStaticStays(t *testing.T) {
	l := prepare(t, setup{config: half})
	l.run()
	l.ready()
	within(t, "the VFs of a PF are in slices", func() error { return l.offers(l.ids[:4]...) })
	file := filepath.Join(manifests, "fixed.json")
	manifest := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "fixed", "namespace": %q},
		"spec": {"terminationGracePeriodSeconds": 1, "containers": [{"name": "app", "image": %q, "imagePullPolicy": "Never",
			"command": ["/bin/sh", "-c", %q], "resources": {"limits": {%q: 1}}}]}}`, l.ns, node.Image, said, slow)
	if err := errors.Join(os.MkdirAll(manifests, 0o755), os.WriteFile(file, []byte(manifest), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(file) })
	name := "fixed-" + nodeName
	l.runs(name)
	l.template("vf", "a", "b", "c", "d")
	l.pod("web", "nic=+vf")
	l.runs("web")
	l.attached("web", l.allocated(l.claimOf("web", "nic"))...)
	if got := l.owned(name); len(got) != 1 || l.pfOf(got[0]) != pf1 {
		t.Errorf("the static pod has %v", got)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	l.gone(name)
}
