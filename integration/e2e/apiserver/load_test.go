// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// clusterLoad is a load on the API server: kubelets report their status, and clients watch all nodes.
type clusterLoad struct {
	updates, events atomic.Int64
	failure         atomic.Value
	stop            func()
}

// startLoad makes each node report its status every 5 minutes, as kubelets do, while other clients watch all nodes.
func (p *controlPlane) startLoad(nodes, watchers int) *clusterLoad {
	p.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	b := &clusterLoad{}
	var running sync.WaitGroup
	b.stop = func() { cancel(); running.Wait() }
	p.Cleanup(b.stop)
	text, err := p.admin.Get().AbsPath("/api/v1/nodes").Param("limit", "1").SetHeader("Accept", "application/json").Do(ctx).Raw()
	kerneltest.Must(p, err)
	var list unstructured.UnstructuredList
	kerneltest.Must(p, list.UnmarshalJSON(text))
	fail := func(err error) {
		if err != nil && ctx.Err() == nil {
			b.failure.Store(err)
		}
	}
	for range watchers {
		stream, err := p.admin.Get().Resource("nodes").Param("watch", "true").Param("resourceVersion", list.GetResourceVersion()).Stream(ctx)
		kerneltest.Must(p, err)
		running.Go(func() {
			defer stream.Close()
			n, err := io.Copy(io.Discard, stream)
			b.events.Add(n)
			fail(err)
		})
	}
	running.Go(func() {
		every := time.NewTicker(5 * time.Minute / time.Duration(nodes))
		defer every.Stop()
		for id := 2; ; id = 2 + (id-1)%(nodes-1) {
			select {
			case <-ctx.Done():
				return
			case <-every.C:
			}
			err := p.admin.Patch(types.StrategicMergePatchType).Resource("nodes").Name(nodeName(id)).SubResource("status").
				Body(harness.Encode(map[string]any{"status": map[string]any{"conditions": conditions(time.Now())}})).Do(ctx).Error()
			fail(err)
			b.updates.Add(1)
		}
	})
	return b
}

// measureCPU starts to measure a process. The returned function returns its CPU use in percent of one core.
func measureCPU(t *testing.T, p *testProcess) (percent func() float64) {
	t.Helper()
	began := time.Now()
	before, err := p.cpuTime()
	kerneltest.Must(t, err)
	return func() float64 {
		now, err := p.cpuTime()
		kerneltest.Must(t, err)
		return 100 * (now - before).Seconds() / time.Since(began).Seconds()
	}
}

var lagFigure = regexp.MustCompile(`(?m)^podlace_node_route_lag_seconds_(sum|count) (\S+)$`)

// agentLag reads the agent's metric for the delay until all routes are updated: the sum in seconds, and the number of delays.
func (n *agentNode) agentLag() (sum, count float64) {
	n.Helper()
	dial := func(_ context.Context, network, address string) (c net.Conn, err error) {
		err = harness.Networked(n.ns, func() error { c, err = net.Dial(network, address); return err })
		return c, err
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	answer, err := client.Get("http://127.0.0.1:9810/metrics")
	kerneltest.Must(n, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	kerneltest.Must(n, err)
	figures := map[string]*float64{"sum": &sum, "count": &count}
	found := lagFigure.FindAllStringSubmatch(string(text), -1)
	for _, f := range found {
		_, err := fmt.Sscan(f[2], figures[f[1]])
		kerneltest.Must(n, err)
	}
	if len(found) != 2 {
		n.Fatalf("the agent serves no lag: %s", text)
	}
	return sum, count
}
