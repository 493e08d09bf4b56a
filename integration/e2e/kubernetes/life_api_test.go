// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// podCIDROf returns the podCIDR of a node.
func (c *testCluster) podCIDROf(t *testing.T, node, family string) string {
	t.Helper()
	for _, cidr := range strings.Fields(c.kubectl(t, "get", "node", node, "-o", "jsonpath={.spec.podCIDRs[*]}")) {
		if familyOf(cidr) == family {
			return cidr
		}
	}
	t.Fatalf("%s has no podCIDR of IPv%s", node, family)
	return ""
}

// stopAPIServer restarts agents while the API server is stopped. No route changes.
func (l *clusterLife) stopAPIServer(t *testing.T) {
	before := l.allRoutes(t)
	var monitors []*eventMonitor
	for _, n := range l.machineNames()[1:] {
		monitors = append(monitors, l.startMonitor(t, n))
	}
	tr := l.startTraffic(t, podPairs()...)
	begin := time.Now()
	l.runScript(t, "exec", "plane", "sh", "-c", "touch /run/node/stay-down; kill -KILL $(cat /run/node/apiserver.pid)")
	time.Sleep(*apiAway / 4)
	for _, n := range l.machineNames()[1:] {
		l.signalAgent(t, n, l.signalAgent(t, n, 0, unix.SIGKILL), 0) // there is a next one
	}
	time.Sleep(time.Until(begin.Add(*apiAway)))
	lost, _ := tr.endFlows(t, "")
	changes := 0
	for _, m := range monitors {
		changes += m.endMonitor(t)
	}
	after := l.allRoutes(t)
	l.runScript(t, "exec", "plane", "rm", "/run/node/stay-down")
	starts := awaitCondition(t, "API server", func() bool {
		_, err := l.try("exec", "", "plane", "kubectl", "get", "--raw", "/readyz")
		return err == nil
	})
	away := time.Since(begin)
	back := time.Now()
	l.addNode(t, 1)
	l.awaitNode(t, 1)
	t.Logf("the API server was away for %.0f s, and its start took %.1f s; %d changes; all agents route a new node %.1f s after that; load %s",
		away.Seconds(), starts.Seconds(), changes, time.Since(back).Seconds(), loadAverage())
	if lost != 0 || changes != 0 || before != after {
		t.Errorf("%d packets lost and %d changes, want none; routes before:\n%s\nafter:\n%s", lost, changes, before, after)
	}
	l.kubectl(t, "delete", "node", joined(1))
	l.awaitAgents(t)
	l.kubectl(t, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s")
}

func joined(i int) string { return fmt.Sprintf("joined%d", i) }

// addNode creates the Node object of a fictitious node, with addresses on the link of node1 and node2.
func (l *clusterLife) addNode(t *testing.T, i int) {
	t.Helper()
	cidrs := []string{fmt.Sprintf("10.244.%d.0/24", 100+i), fmt.Sprintf("fd00:10:244:%x::/64", 100+i)}
	l.applyObjects(t, map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": joined(i)},
		"spec": map[string]any{"podCIDR": cidrs[0], "podCIDRs": cidrs}})
	status, err := json.Marshal(map[string]any{"status": map[string]any{"addresses": []any{
		map[string]any{"type": "InternalIP", "address": fmt.Sprintf("192.0.2.%d", 150+i)},
		map[string]any{"type": "InternalIP", "address": fmt.Sprintf("2001:db8::%d", 150+i)}}}})
	if err != nil {
		t.Fatal(err)
	}
	l.kubectl(t, "patch", "node", joined(i), "--subresource=status", "--type=merge", "-p", string(status))
}

// awaitNode waits until all nodes have routes that lead to the pods of a new node.
func (l *clusterLife) awaitNode(t *testing.T, i int) {
	t.Helper()
	for _, n := range l.machineNames()[1:] {
		for _, f := range l.families {
			pod := map[string]string{"4": fmt.Sprintf("10.244.%d.9", 100+i), "6": fmt.Sprintf("fd00:10:244:%x::9", 100+i)}[f]
			to := map[string]string{"4": fmt.Sprintf("192.0.2.%d", 150+i), "6": fmt.Sprintf("2001:db8::%d", 150+i)}[f]
			awaitCondition(t, "route of "+n+" to "+joined(i), func() bool {
				via := l.gatewayOf(t, n, pod)
				return via == to || n == "node3" && strings.HasPrefix(via, "169.254.") || n == "node3" && strings.HasPrefix(via, "fe80:")
			})
		}
	}
}

// joinNodes creates and deletes 20 Nodes, whose routes the agents add and remove. Routes to the existing nodes stay.
func (l *clusterLife) joinNodes(t *testing.T) {
	const count = 20
	before := l.allRoutes(t)
	tr := l.startTraffic(t, podPairs()...)
	var lags []time.Duration
	for i := range count {
		l.addNode(t, i)
		begin := time.Now()
		l.awaitNode(t, i)
		lags = append(lags, time.Since(begin))
	}
	slices.Sort(lags)
	for i := range count {
		l.kubectl(t, "delete", "node", joined(i))
	}
	gone := awaitCondition(t, "end of the routes to nodes that left", func() bool { return l.allRoutes(t) == before })
	lost, _ := tr.endFlows(t, "")
	t.Logf("%d nodes joined: routes on all nodes %.0f ms after the Node had podCIDRs and addresses (median), at most %.0f ms; gone %.1f s after the last left; load %s",
		count, float64(lags[count/2].Milliseconds()), float64(lags[count-1].Milliseconds()), gone.Seconds(), loadAverage())
	if lost != 0 {
		t.Errorf("%d packets lost, want none", lost)
	}
}
