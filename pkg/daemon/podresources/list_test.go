// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/poddevices"
)

// TestList checks that devices are in the order of pods and containers, also after a busy kubelet has refused calls.
func TestList(t *testing.T) {
	other := webPod("app", "z")
	other.Namespace = "bank"
	k := startServer(t, &fakeKubelet{list: func(n int) ([]*api.PodResources, error) {
		if n < 2 {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		return []*api.PodResources{richPod(), other, {Namespace: "shop", Name: "plain"}}, nil
	}})
	want := append([]poddevices.Device{{Namespace: "bank", Pod: "web-0", Container: "app", Resource: "example.com/fast", ID: "z"}},
		richDevices()...)
	got, err := List(t.Context(), k.Kubelet)
	if diff := cmp.Diff(want, got); diff != "" || err != nil || len(k.questions()) != 3 {
		t.Errorf("%v after %d questions\n%s", err, len(k.questions()), diff)
	}
	k.Resources = []string{"example.com/gpu"}
	if got, err := List(t.Context(), k.Kubelet); len(got) != 1 || got[0].ID != "x" || err != nil {
		t.Errorf("%v, %v", got, err)
	}
}

// TestListOfEndlessAnswer: List refuses a larger answer than any kubelet sends at once, and says so.
func TestListOfEndlessAnswer(t *testing.T) {
	k := startServer(t, &fakeKubelet{list: func(int) ([]*api.PodResources, error) {
		return []*api.PodResources{{Namespace: "shop", Name: strings.Repeat("x", maxResponse)}}, nil
	}})
	if _, err := List(t.Context(), k.Kubelet); err == nil || !strings.Contains(err.Error(), "the answer is larger than 16777216 bytes") ||
		len(k.questions()) != 1 {
		t.Errorf("%v after %d questions", err, len(k.questions()))
	}
}

// TestAllocatable checks that the devices in the result of Allocatable have no pod name.
func TestAllocatable(t *testing.T) {
	k := startServer(t, &fakeKubelet{allocatable: append(richPod().Containers[1].Devices,
		&api.ContainerDevices{ResourceName: "example.com/none"})})
	want := richDevices()
	for i, d := range want {
		want[i] = poddevices.Device{Resource: d.Resource, ID: d.ID, NUMA: d.NUMA}
	}
	got, cpus, err := Allocatable(t.Context(), k.Kubelet)
	if diff := cmp.Diff(want, got); diff != "" || !slices.Equal(cpus, []int64{1, 2}) || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}

// TestListFails checks that List returns a permanent error at once. After a temporary error, List retries until the deadline.
func TestListFails(t *testing.T) {
	broken := startServer(t, &fakeKubelet{list: func(int) ([]*api.PodResources, error) { return nil, status.Error(codes.Internal, "broken") }})
	if got, err := List(t.Context(), broken.Kubelet); got != nil || err == nil || !strings.Contains(err.Error(), "broken") ||
		!slices.Equal(broken.questions(), []string{"List"}) {
		t.Errorf("%v, %v after %d questions", got, err, len(broken.questions()))
	}
	none := newRoot(t)
	if _, err := List(t.Context(), none); err == nil || !strings.Contains(err.Error(), "no such file") ||
		errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a socket: %v", err)
	}
	left := newRoot(t)
	l := listen(t, left)
	l.(interface{ SetUnlinkOnClose(bool) }).SetUnlinkOnClose(false)
	l.Close()
	err := untilUp(t, syscall.ECONNREFUSED.Error(), func(ctx context.Context) error { _, err := List(ctx, left); return err })
	if err == nil || !strings.Contains(err.Error(), syscall.ECONNREFUSED.Error()) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a kubelet that is restarted: %v", err)
	}
}
