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

// podLister is a kubelet that returns the CPUs of each pod, by its name in the namespace "shop".
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

// TestAligned checks that each attachment of a claim's VF is counted once, labelled by whether the pod's CPUs belong to the VF's NUMA
// node.
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
		_, err := l.prepare(t.Context(), own)
		must(t, err)
		l.writeJournal(own, c.address, c.pod, "/proc/self/ns/net")
		defer l.detach(c.address)
	}
	collector := &collector{Driver: l.Driver, began: began.Truncate(time.Second)}
	collector.countAlignment(t.Context(), time.Now())
	if len(collector.counted) != 0 {
		t.Errorf("counted before containers run: %v", collector.counted)
	}
	for range 3 {
		collector.countAlignment(t.Context(), time.Now().Add(alignAfter))
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
