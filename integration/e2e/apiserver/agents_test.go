// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// agentCluster is three nodes, two on one link and one behind a router.
type agentCluster struct {
	*controlPlane
	nodes []*agentNode
	other []int // the numbers of Node objects without a machine
}

// TestStreamedNodes: three agents with the shipped manifest's rights manage three nodes. The API server streams the Nodes to them.
func TestStreamedNodes(t *testing.T) {
	c := newCluster(t)
	c.runEvents()
	streamed, refused, lists := 0, 0, 0
	for _, r := range c.agentRequests() {
		switch stream := strings.Contains(r.RequestURI, "sendInitialEvents=true"); {
		case stream && r.Response.Code == 200:
			streamed++
		case stream: // a new API server does not yet know the rights
			refused++
		case r.Verb == "list" && r.Response.Code == 200:
			lists++
		}
	}
	if streamed < 5 || lists > refused {
		t.Errorf("the API server streamed the nodes %d times, refused to stream %d times, and sent %d lists; want a stream for each of 5 starts",
			streamed, refused, lists)
	}
}

// TestNodesInPages: agents manage three nodes of an API server that sends lists in pages because it cannot stream them.
func TestNodesInPages(t *testing.T) {
	c := newCluster(t, "--feature-gates=WatchList=false")
	c.runEvents()
	lists := 0
	for _, r := range c.agentRequests() {
		if strings.Contains(r.RequestURI, "sendInitialEvents=true") && r.Response.Code == 200 {
			t.Errorf("the API server streamed the nodes: %+v", r)
		}
		if r.Verb == "list" && strings.Contains(r.RequestURI, "limit=100") && r.Response.Code == 200 {
			lists++
		}
	}
	if lists < 5 {
		t.Errorf("the API server sent %d lists in pages, want one for each of 5 starts", lists)
	}
}

func newCluster(t *testing.T, flags ...string) *agentCluster {
	t.Helper()
	needAPI(t)
	createLinks(t)
	c := &agentCluster{controlPlane: newPlane(t, flags...)}
	for i, link := range []string{"lan", "lan", "far"} {
		_, err := c.joinNode(nodeObject(i+1, link), i+1)
		kerneltest.Must(t, err)
		c.nodes = append(c.nodes, c.newNode(i+1, link))
	}
	return c
}

// runEvents starts the agents, adds and deletes nodes, and restarts the API server and an agent.
func (c *agentCluster) runEvents() {
	began := time.Now()
	for _, n := range c.nodes {
		n.startAgent()
	}
	for _, n := range c.nodes {
		n.awaitReady()
	}
	c.Logf("three agents are ready %.1f s after their start, load %s", time.Since(began).Seconds(), loadAverages())
	c.attachPods()
	c.joinNodes(50)
	c.deleteNode()
	c.restartAPI()
	c.restartWritesNothing()
}

// attachPods attaches a pod on each node and checks that all pods reach each other.
func (c *agentCluster) attachPods() {
	c.Helper()
	var pods []*sandbox.Pod
	for _, n := range c.nodes {
		pods = append(pods, n.attachPod())
	}
	for _, from := range pods {
		for _, to := range pods {
			if from != to {
				harness.Reach(c, from, harness.AddressOf(c.T, to, "-4")+":80", to)
				harness.Reach(c, from, "["+harness.AddressOf(c.T, to, "-6")+"]:80", to)
			}
		}
	}
}

// joinNodes adds nodes one after another, and waits each time until all others have routes to the new one.
func (c *agentCluster) joinNodes(count int) {
	c.Helper()
	var heard []*routeArrivals
	for _, n := range c.nodes {
		heard = append(heard, n.recordArrivals())
	}
	var lags []time.Duration
	for id := 10; id < 10+count; id++ {
		before, err := c.joinNode(nodeObject(id, "lan"), id)
		kerneltest.Must(c, err)
		c.other = append(c.other, id)
		for _, a := range heard {
			lags = append(lags, a.awaitRoutes(c.T, podCIDRs(id)).Sub(before))
		}
	}
	c.Logf("%d joins: %s from podCIDRs to the routes of a node, load %s", count, quantiles(lags), loadAverages())
	c.checkRoutes()
}

// awaitRoutes waits for all routes and returns when the last one appeared, which is when it was read if the kernel dropped its event.
func (a *routeArrivals) awaitRoutes(t *testing.T, prefixes []netip.Prefix) (last time.Time) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		last, ok := a.lastArrival(prefixes)
		if ok {
			return last
		}
		if a.droppedEvents() {
			a.readRoutes()
			time.Sleep(100 * time.Millisecond)
		}
		if time.Now().After(end) {
			t.Fatalf("no routes to %v", prefixes)
		}
	}
}

// checkRoutes compares the routes of all nodes with the Node objects.
func (c *agentCluster) checkRoutes() {
	c.Helper()
	for i, n := range c.nodes {
		got := n.routeGateways()
		if want := 2 * (len(c.nodes) + len(c.other)); len(got) != want {
			c.Errorf("%s has %d routes, want %d: %v\n%s", n.name, len(got), want, got, n.statusProblems())
		}
		for _, id := range c.other {
			for family, cidr := range podCIDRs(id) {
				gateway, there := got[cidr]
				if direct := gateway.String() == nodeAddresses(id, "lan")[family]; !there || direct != (i < 2) {
					c.Errorf("the route of %s to %s: there %t, gateway %s", n.name, cidr, there, gateway)
				}
			}
		}
	}
}

// deleteNode deletes a Node while one agent is stopped. Once started, it must delete the routes to this node.
func (c *agentCluster) deleteNode() {
	c.Helper()
	n, id := c.nodes[0], c.other[0]
	n.stopAgent()
	c.remove(id)
	c.other = c.other[1:]
	for _, running := range c.nodes[1:] {
		running.lacks(id)
	}
	if _, there := n.routeGateways()[podCIDRs(id)[0]]; !there {
		c.Errorf("an agent that is down deleted a route")
	}
	began := time.Now()
	n.startAgent()
	n.lacks(id)
	c.Logf("the routes of a deleted node are gone %.2f s after the start of the agent, load %s", time.Since(began).Seconds(), loadAverages())
	n.awaitReady()
	c.checkRoutes()
}

func (n *agentNode) lacks(id int) {
	n.Helper()
	harness.Await(n, n.name+" to lack the routes of a deleted node", func() bool {
		routes := n.routeGateways()
		return !slices.ContainsFunc(podCIDRs(id), func(cidr netip.Prefix) bool { _, there := routes[cidr]; return there })
	})
}

// restartAPI restarts the API server while the agents run, which must not delete a route. Then all agents add routes to a node that joins.
func (c *agentCluster) restartAPI() {
	c.Helper()
	var heard []*routeArrivals
	for _, n := range c.nodes {
		heard = append(heard, n.recordArrivals())
	}
	c.killAPI(3 * time.Second)
	back := time.Now()
	const id = 200
	_, err := c.joinNode(nodeObject(id, "lan"), id)
	kerneltest.Must(c, err)
	c.other = append(c.other, id)
	for i, a := range heard {
		c.Logf("the API server is back: %s has the routes to a new node after %.1f s", c.nodes[i].name, a.awaitRoutes(c.T, podCIDRs(id)).Sub(back).Seconds())
		if gone := a.deletedRoutes(); gone > 0 {
			c.Errorf("%s deleted %d routes while the API server was away", c.nodes[i].name, gone)
		}
	}
	c.checkRoutes()
}

// restartWritesNothing restarts an agent of an unchanged cluster, which must write nothing to the kernel or to files. In the end it deletes
// a node, to prove that monitorWrites sees changes of routes.
func (c *agentCluster) restartWritesNothing() {
	c.Helper()
	n := c.nodes[1]
	n.restartAgent()
	changes := n.monitorWrites()
	c.remove(c.other[0])
	n.lacks(c.other[0])
	if got := changes(); len(got) < 2 {
		c.Errorf("the monitor sees nothing when routes are deleted: %q", got)
	}
}

// agentRequests returns the agents' requests to the API server, which must be for Nodes only, as their token permits nothing else.
func (c *agentCluster) agentRequests() (agents []auditRequest) {
	c.Helper()
	for _, r := range c.auditRequests() {
		if r.ObjectRef.Resource != "nodes" || r.Verb != "list" && r.Verb != "watch" || !strings.HasPrefix(r.UserAgent, "podlace-node/") {
			c.Errorf("not a request of an agent for nodes: %+v", r)
		}
		agents = append(agents, r)
	}
	account := c.clientFor(c.token)
	for _, path := range []string{"pods", "services", "namespaces/podlace/secrets", "namespaces/podlace/configmaps"} {
		if err := account.Get().AbsPath("/api/v1/" + path).Do(context.Background()).Error(); !apierrors.IsForbidden(err) {
			c.Errorf("the agents may read %s: %v", path, err)
		}
	}
	for verb, err := range map[string]error{
		"create": account.Post().Resource("nodes").Body(nodeObject(300, "lan")).Do(context.Background()).Error(),
		"delete": account.Delete().Resource("nodes").Name("node-1").Do(context.Background()).Error(),
		"patch": account.Patch("application/merge-patch+json").Resource("nodes").Name("node-1").Body([]byte(`{"metadata":{"labels":{"a":"b"}}}`)).
			Do(context.Background()).Error(),
		"patch the status of": account.Patch("application/merge-patch+json").Resource("nodes").Name("node-1").SubResource("status").
			Body([]byte(`{"status":{"phase":"Running"}}`)).Do(context.Background()).Error(),
	} {
		if !apierrors.IsForbidden(err) {
			c.Errorf("the agents may %s nodes: %v", verb, err)
		}
	}
	return agents
}
