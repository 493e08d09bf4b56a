// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/claim"
)

// podLister is a fake kubelet that returns the CPUs of each pod. The keys of the map cpus are the names of pods. All pods are in the
// namespace "shop".
type podLister struct {
	podresources.UnimplementedPodResourcesListerServer
	cpus map[string][]int64
}

func (p podLister) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	answer := &podresources.ListPodResourcesResponse{}
	for name, cpus := range p.cpus {
		answer.PodResources = append(answer.PodResources, &podresources.PodResources{Namespace: "shop", Name: name,
			Containers: []*podresources.ContainerResources{{Name: "sidecar"}, {Name: "app", CpuIds: cpus}}})
	}
	return answer, nil
}

// TestAligned (DRA-10) checks that the metric counts each attachment of a claim's VF once. A label of the metric shows whether the pod's
// CPUs belong to the VF's NUMA node.
func TestAligned(t *testing.T) {
	registry := prometheus.NewRegistry()
	l := newDRALab(t, func(o *Options) { o.Metrics = registry })
	folder := filepath.Join(l.options.Kubelet, "pod-resources")
	must(t, os.MkdirAll(folder, 0o755))
	listener, err := net.Listen("unix", filepath.Join(folder, "kubelet.sock"))
	must(t, err)
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, podLister{cpus: map[string][]int64{"near": {0, 15}, "far": {3, 16},
		"anywhere": nil}})
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	began := time.Now().Add(-time.Second)
	for i, c := range []struct{ pod, address string }{{"near", vf0}, {"far", vf1}, {"anywhere", vf2}} {
		uid := string(rune('a' + i))
		own := newClaim(uid, c.pod, deviceResult("a", c.address))
		_, err := l.prepare(t.Context(), own, false)
		must(t, err)
		l.writeJournal(own, c.address, c.pod, "/proc/self/ns/net")
		defer l.detach(c.address)
	}
	done := l.countAlignment(t.Context(), began.Truncate(time.Second), time.Now(), nil)
	if len(done) != 0 {
		t.Errorf("counted before containers run: %v", done)
	}
	for range 3 {
		done = l.countAlignment(t.Context(), began.Truncate(time.Second), time.Now().Add(alignAfter), done)
	}
	got := map[string]float64{}
	families, err := registry.Gather()
	must(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "podlace_sriov_claims_total" && m.GetLabel()[1].GetValue() == fast {
				got[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	if diff := cmp.Diff(map[string]float64{"yes": 1, "no": 1, "unknown": 1}, got); diff != "" {
		t.Error(diff)
	}
	must(t, claim.Remove(l.options.Claims, "a"))
}
