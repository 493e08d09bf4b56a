// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/poddevices"
)

// TestMainAnswers checks the program that the sriov plugin starts: its answer has the devices or the cause of the error, in time.
func TestMainAnswers(t *testing.T) {
	k := startServer(t, &fakeKubelet{get: func(_ int, r *api.GetPodResourcesRequest) (*api.PodResources, error) {
		if r.GetPodName() == "web-0" {
			return webPod("app", "a"), nil
		}
		return &api.PodResources{Namespace: "shop", Name: "web-1"}, nil
	}})
	answer := func(q poddevices.KubeletQuestion) (a poddevices.Answer) {
		t.Helper()
		q.Namespace, q.Folder = "shop", filepath.Dir(filepath.Dir(k.Socket))
		stdin, _ := json.Marshal(q)
		var stdout bytes.Buffer
		if exit := Main(nil, bytes.NewReader(stdin), &stdout); exit != 0 {
			t.Errorf("exit status %d", exit)
		}
		if err := json.Unmarshal(stdout.Bytes(), &a); err != nil {
			t.Errorf("%v: %s", err, &stdout)
		}
		return a
	}
	of := func(pod string) poddevices.KubeletQuestion {
		return poddevices.KubeletQuestion{Question: poddevices.Question{Pod: pod, UID: after}, Timeout: maxWait}
	}
	want := poddevices.Answer{Devices: webDevices("app", "a")}
	if diff := cmp.Diff(want, answer(of("web-0"))); diff != "" {
		t.Error(diff)
	}
	q := of("web-1")
	if q.InUse = true; answer(q).Error != "" {
		t.Errorf("no checkpoint on a node with claims: %+v", answer(q))
	}
	q.InUse, q.Timeout = false, 100*time.Millisecond
	if a := answer(q); a.Cause != poddevices.ErrNoCheckpoint || !strings.Contains(a.Error, "context deadline exceeded") {
		t.Errorf("no checkpoint: %+v", a)
	}
	k.note(t, fast(after, "app", "a"))
	q = of("web-0")
	if q.Resources = []string{"example.com/gpu"}; len(answer(q).Devices) != 0 || answer(q).Error != "" {
		t.Errorf("another resource: %+v", answer(q))
	}
	for stdin, says := range map[string]string{"": "want a question of the sriov plugin", "{": "want a question"} {
		var stdout bytes.Buffer
		if exit := Main(nil, strings.NewReader(stdin), &stdout); exit != 0 || !strings.Contains(stdout.String(), says) {
			t.Errorf("%q: %d, %s", stdin, exit, &stdout)
		}
	}
}

// TestNode checks what the kubelet can assign, and what of it pods have.
func TestNode(t *testing.T) {
	k := startServer(t, &fakeKubelet{allocatable: richPod().Containers[1].Devices, list: func(int) ([]*api.PodResources, error) {
		c := &api.ContainerResources{CpuIds: []int64{2}, Devices: []*api.ContainerDevices{
			{ResourceName: "example.com/fast", DeviceIds: []string{"0000:af:10.1"}}, {ResourceName: "example.com/slow", DeviceIds: []string{"x"}}}}
		return []*api.PodResources{{Namespace: "shop", Name: "a", Containers: []*api.ContainerResources{c}}}, nil
	}})
	fast, gpu := "example.com/fast", "example.com/gpu"
	want := poddevices.Node{CPUs: []int64{1, 2}, TakenCPUs: []int64{2}, Devices: []poddevices.Assignable{
		{Resource: fast, ID: "0000:3b:10.2", NUMA: []int{0}}, {Resource: fast, ID: "0000:3b:10.1", NUMA: []int{0}},
		{Resource: fast, ID: "0000:af:10.1", NUMA: []int{1}, Taken: true}, {Resource: gpu, ID: "x"}}}
	got, err := Node(t.Context(), k.Kubelet)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}
