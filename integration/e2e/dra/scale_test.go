// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"flag"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

var (
	scaleNodes = flag.Int("nodes", 0, "TestScale: Node objects with slices, without a kubelet; 0 skips the test")
	scaleVFs   = flag.Int("vfs", 16, "TestScale: VFs of each node, at most 64")
	scalePods  = flag.Int("pods", 2000, "TestScale: pods with a ResourceClaimTemplate for one VF")
)

// writers is the number of parallel requests.
const writers = 32

// TestScale measures how fast the scheduler binds pods with claims in a cluster of many nodes. The others' slices are copies of the real
// node's; they have no kubelet, so their pods are bound and never run.
func TestScale(t *testing.T) {
	if *scaleNodes == 0 {
		t.Skip("SKIP: -nodes is 0")
	}
	l := newLab(t, setup{})
	config := *l.config
	config.QPS, config.Burst = 10000, 10000
	client, err := kubernetes.NewForConfig(&config)
	if err != nil {
		t.Fatal(err)
	}
	devices := slices.Collect(maps.Values(l.devices()))
	t.Cleanup(func() { l.removeScale(client) })
	begin := time.Now()
	inParallel(t, *scaleNodes, func(i int) error {
		name := fmt.Sprint("scale-", i)
		if _, err := client.CoreV1().Nodes().Create(t.Context(), scaleNode(name), metav1.CreateOptions{}); err != nil {
			return err
		}
		_, err := client.ResourceV1().ResourceSlices().Create(t.Context(), scaleSlice(name, devices), metav1.CreateOptions{})
		return err
	})
	t.Logf("%d nodes with %d VFs each are written after %.0f s, load %s", *scaleNodes, *scaleVFs, time.Since(begin).Seconds(), load())
	l.template("vf", "nic")
	begin = time.Now()
	inParallel(t, *scalePods, func(i int) error {
		_, err := client.CoreV1().Pods(l.ns).Create(t.Context(), scalePod(fmt.Sprint("pod-", i)), metav1.CreateOptions{})
		return err
	})
	written := time.Since(begin)
	bound := 0
	for end := time.Now().Add(30 * time.Minute); bound < *scalePods && time.Now().Before(end); time.Sleep(time.Second) {
		list, err := client.CoreV1().Pods(l.ns).List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName!=", ResourceVersion: "0"})
		if err != nil {
			t.Fatal(err)
		}
		bound = len(list.Items)
	}
	took := time.Since(begin)
	if bound != *scalePods {
		t.Fatalf("%d of %d pods are bound after %.0f s", bound, *scalePods, took.Seconds())
	}
	l.noVFTwice(client)
	t.Logf("%d pods are written after %.0f s and bound after %.0f s: %.0f a second, load %s", *scalePods, written.Seconds(), took.Seconds(),
		float64(*scalePods)/took.Seconds(), load())
}

// inParallel calls f in parallel for each number from 0 to n-1, and fails the test with the first error.
func inParallel(t *testing.T, n int, f func(i int) error) {
	t.Helper()
	var wait sync.WaitGroup
	var next atomic.Int64
	errs := make(chan error, writers)
	for range writers {
		wait.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if err := f(int(i)); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wait.Wait()
	close(errs)
	for err := range errs {
		t.Fatal(err)
	}
}

// scaleLabel is the label that selects the nodes of TestScale.
const scaleLabel = "podlace-scale"

func scaleNode(name string) *core.Node {
	room := core.ResourceList{core.ResourceCPU: quantity.MustParse("64"), core.ResourceMemory: quantity.MustParse("256Gi"),
		core.ResourcePods: quantity.MustParse("110")}
	return &core.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{scaleLabel: "yes"}},
		Status: core.NodeStatus{Capacity: room, Allocatable: room, Conditions: []core.NodeCondition{{Type: core.NodeReady,
			Status: core.ConditionTrue, LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}}}}
}

func scaleSlice(node string, of []resourceapi.Device) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-slice", Labels: map[string]string{scaleLabel: "yes"}},
		Spec: resourceapi.ResourceSliceSpec{Driver: driverName, NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1}}}
	for i := range *scaleVFs {
		device := *of[i%len(of)].DeepCopy()
		device.Name = fmt.Sprintf("vf-%d", i)
		s.Spec.Devices = append(s.Spec.Devices, device)
	}
	return s
}

// scalePod returns a pod that tolerates the taints of nodes without a kubelet.
func scalePod(name string) *core.Pod {
	template := "vf"
	return &core.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: core.PodSpec{
		NodeSelector:   map[string]string{scaleLabel: "yes"},
		Tolerations:    []core.Toleration{{Operator: core.TolerationOpExists}},
		ResourceClaims: []core.PodResourceClaim{{Name: "nic", ResourceClaimTemplateName: &template}},
		Containers: []core.Container{{Name: "app", Image: "never", Resources: core.ResourceRequirements{
			Claims: []core.ResourceClaim{{Name: "nic"}}}}}}}
}

// noVFTwice fails the test if two claims have the same VF.
func (l *lab) noVFTwice(client kubernetes.Interface) {
	l.Helper()
	claims, err := client.ResourceV1().ResourceClaims(l.ns).List(l.Context(), metav1.ListOptions{})
	if err != nil {
		l.Fatal(err)
	}
	owner := map[string]string{}
	for _, c := range claims.Items {
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			id := r.Pool + " " + r.Device
			if owner[id] != "" {
				l.Errorf("claims %s and %s have VF %s", owner[id], c.Name, id)
			}
			owner[id] = c.Name
		}
	}
	if len(owner) != *scalePods {
		l.Errorf("%d VFs are allocated to %d pods", len(owner), *scalePods)
	}
}

// removeScale deletes the objects of TestScale, pods by force because no kubelet would end them.
func (l *lab) removeScale(client kubernetes.Interface) {
	ctx, now := l.background(), int64(0)
	selected := metav1.ListOptions{LabelSelector: scaleLabel}
	for _, err := range []error{
		client.CoreV1().Pods(l.ns).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{}),
		client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, selected),
		client.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, selected),
	} {
		if err != nil {
			l.Error(err)
		}
	}
}
