// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/allocation"
)

// TestList checks that List returns the devices in the order of pods and containers, also after refusals of a busy kubelet.
func TestList(t *testing.T) {
	other := web("app", "z")
	other.Namespace = "bank"
	k := start(t, &kubelet{list: func(n int) ([]*api.PodResources, error) {
		if n < 2 {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		return []*api.PodResources{rich(), other, {Namespace: "shop", Name: "plain"}}, nil
	}})
	want := append([]allocation.Device{{Namespace: "bank", Pod: "web-0", Container: "app", Resource: "example.com/fast", ID: "z"}},
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

// TestAllocatable checks that allocatable devices are returned without a pod.
func TestAllocatable(t *testing.T) {
	k := start(t, &kubelet{allocatable: append(rich().Containers[1].Devices, &api.ContainerDevices{ResourceName: "example.com/none"})})
	want := richDevices()
	for i, d := range want {
		want[i] = allocation.Device{Resource: d.Resource, ID: d.ID, NUMA: d.NUMA}
	}
	got, err := Allocatable(t.Context(), k.Kubelet)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}

// TestAllocatableCPUs: they are in the same answer as the devices.
func TestAllocatableCPUs(t *testing.T) {
	k := start(t, &kubelet{allocatable: rich().Containers[1].Devices})
	if got, err := AllocatableCPUs(t.Context(), k.Kubelet); !slices.Equal(got, []int64{1, 2}) || err != nil {
		t.Errorf("%v, %v", got, err)
	}
}

// TestListFails: List returns a permanent error at once, and retries after a temporary one until the deadline.
func TestListFails(t *testing.T) {
	broken := start(t, &kubelet{list: func(int) ([]*api.PodResources, error) { return nil, status.Error(codes.Internal, "broken") }})
	if got, err := List(t.Context(), broken.Kubelet); got != nil || err == nil || !strings.Contains(err.Error(), "broken") ||
		!slices.Equal(broken.questions(), []string{"List"}) {
		t.Errorf("%v, %v after %d questions", got, err, len(broken.questions()))
	}
	none := root(t)
	if _, err := List(t.Context(), none); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a socket: %v", err)
	}
	left := root(t)
	l := listen(t, left)
	l.(interface{ SetUnlinkOnClose(bool) }).SetUnlinkOnClose(false)
	l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := List(ctx, left); !errors.Is(err, syscall.ECONNREFUSED) || ctx.Err() == nil {
		t.Errorf("a kubelet that is restarted: %v", err)
	}
}
