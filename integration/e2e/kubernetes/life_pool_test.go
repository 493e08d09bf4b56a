// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"flag"
	"fmt"
	"testing"
	"time"
)

var exhausted = flag.Duration("exhausted", 45*time.Second, "TestPoolExhausted: how long pods wait for an address")

// TestPoolExhausted: of 9 pods on a node with 5 pod addresses, none is evicted, and those that wait start when others end. The node stays
// Ready.
func TestPoolExhausted(t *testing.T) {
	const room, count = 5, 9
	c := startCluster(t, "4 6", "CONTROLLERS=--node-cidr-mask-size-ipv4=29")
	c.setUpNetwork(t)
	var objects []any
	for i := range count {
		objects = append(objects, idlePod("default", fmt.Sprintf("pod-%d", i), 1, "pool"))
	}
	c.kubectl(t, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
	c.applyObjects(t, objects...)
	awaitCondition(t, "full node", func() bool { return len(c.poolPods(t)["Running"]) == room && len(c.failedSandboxes(t, "default")) > 0 })
	looks, since := 0, time.Now()
	for ; time.Since(since) < *exhausted; time.Sleep(2 * time.Second) {
		looks++
		if ready := c.kubectl(t, "get", "node", "node1", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`); ready != "True" {
			t.Fatalf("node1 is Ready=%s %v after its addresses were taken", ready, time.Since(since))
		}
		if pods := c.poolPods(t); len(pods["Running"]) != room || len(pods["Pending"]) != count-room {
			t.Fatalf("%v: the pods are %v, want %d running and %d pending", time.Since(since), pods, room, count-room)
		}
	}
	t.Logf("a node with room for %d of %d pods was Ready %d of %d times in %.0f s, and no pod was evicted; load %s", room, count, looks, looks,
		time.Since(since).Seconds(), loadAverage())
	var waits []time.Duration
	for left := count - room; left > 0; left-- {
		running := c.poolPods(t)["Running"]
		c.kubectl(t, "delete", "pod", running[0])
		waits = append(waits, awaitCondition(t, "pod in the place of one that left", func() bool {
			return len(c.poolPods(t)["Running"]) == room
		}))
	}
	if pods := c.poolPods(t); len(pods["Running"]) != room || len(pods) != 1 {
		t.Errorf("the pods are %v, want %d running", pods, room)
	}
	t.Logf("replacement pods started after %v; the kubelet tries again every 10 to 20 s", waits)
}

// poolPods returns the names of the pods, grouped by phase.
func (c *testCluster) poolPods(t *testing.T) map[string][]string {
	t.Helper()
	var list struct {
		Items []struct {
			Metadata struct {
				Name              string
				DeletionTimestamp string
			}
			Status struct{ Phase, Reason string }
		}
	}
	c.getObjects(t, &list, "pods", "-l", "batch=pool")
	phases := map[string][]string{}
	for _, p := range list.Items {
		if p.Metadata.DeletionTimestamp == "" {
			phases[p.Status.Phase+p.Status.Reason] = append(phases[p.Status.Phase+p.Status.Reason], p.Metadata.Name)
		}
	}
	return phases
}
