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
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/sandbox"
)

// cluster has three nodes: two share a link, the third is behind a router.
type cluster struct {
	*plane
	nodes []*node
	other []int // the numbers of Node objects without a machine
}

// TestStreamedNodes: agents with the rights of the shipped manifest manage three nodes, and the API server streams the Node objects to
// them.
func TestStreamedNodes(t *testing.T) {
	c := newCluster(t)
	c.live()
	streamed, refused, lists := 0, 0, 0
	for _, r := range c.rights() {
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

// TestNodesInPages: the same for an API server that cannot stream lists.
func TestNodesInPages(t *testing.T) {
	c := newCluster(t, "--feature-gates=WatchList=false")
	c.live()
	lists := 0
	for _, r := range c.rights() {
		if strings.Contains(r.RequestURI, "sendInitialEvents=true") && r.Response.Code == 200 {
			t.Errorf("the API server streamed the nodes: %+v", r)
		}
		if r.Verb == "list" && strings.Contains(r.RequestURI, "limit=500") && r.Response.Code == 200 {
			lists++
		}
	}
	if lists < 5 {
		t.Errorf("the API server sent %d lists in pages, want one for each of 5 starts", lists)
	}
}

func newCluster(t *testing.T, flags ...string) *cluster {
	t.Helper()
	need(t)
	links(t)
	c := &cluster{plane: newPlane(t, flags...)}
	for i, link := range []string{"lan", "lan", "far"} {
		_, err := c.join(object(i+1, link), i+1)
		kerneltest.Must(t, err)
		c.nodes = append(c.nodes, c.newNode(i+1, link))
	}
	return c
}

// live runs the events of a cluster's life. The agents start five times.
func (c *cluster) live() {
	began := time.Now()
	for _, n := range c.nodes {
		n.start()
	}
	for _, n := range c.nodes {
		n.awaitReady()
	}
	c.Logf("three agents are ready %.1f s after their start, load %s", time.Since(began).Seconds(), load())
	c.connect()
	c.joins(50)
	c.deletion()
	c.outage()
	c.restartWritesNothing()
}

// connect attaches a pod on each node. All reach each other.
func (c *cluster) connect() {
	c.Helper()
	var pods []*sandbox.Pod
	for _, n := range c.nodes {
		pods = append(pods, n.pod())
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

// joins adds nodes one after another, each once all nodes have the routes to the previous one.
func (c *cluster) joins(count int) {
	c.Helper()
	var heard []*arrivals
	for _, n := range c.nodes {
		heard = append(heard, n.arrivals())
	}
	var lags []time.Duration
	for id := 10; id < 10+count; id++ {
		before, err := c.join(object(id, "lan"), id)
		kerneltest.Must(c, err)
		c.other = append(c.other, id)
		for _, a := range heard {
			lags = append(lags, a.await(c.T, podCIDRs(id)).Sub(before))
		}
	}
	c.Logf("%d joins: %s from podCIDRs to the routes of a node, load %s", count, quantiles(lags), load())
	c.complete()
}

// await returns the time at which the last of several routes appeared. If the kernel dropped events, await reads its routes, which is
// later.
func (a *arrivals) await(t *testing.T, prefixes []netip.Prefix) (last time.Time) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		last, ok := a.of(prefixes)
		if ok {
			return last
		}
		if a.droppedEvents() {
			a.read()
			time.Sleep(100 * time.Millisecond)
		}
		if time.Now().After(end) {
			t.Fatalf("no routes to %v", prefixes)
		}
	}
}

// complete compares the routes of all nodes with the Node objects.
func (c *cluster) complete() {
	c.Helper()
	for i, n := range c.nodes {
		got := n.routes()
		if want := 2 * (len(c.nodes) + len(c.other)); len(got) != want {
			c.Errorf("%s has %d routes, want %d: %v\n%s", n.name, len(got), want, got, n.problems())
		}
		for _, id := range c.other {
			for family, cidr := range podCIDRs(id) {
				gateway, there := got[cidr]
				if direct := gateway.String() == addresses(id, "lan")[family]; !there || direct != (i < 2) {
					c.Errorf("the route of %s to %s: there %t, gateway %s", n.name, cidr, there, gateway)
				}
			}
		}
	}
}

// deletion deletes a node while an agent is stopped.
func (c *cluster) deletion() {
	c.Helper()
	n, id := c.nodes[0], c.other[0]
	n.stop()
	c.remove(id)
	c.other = c.other[1:]
	for _, running := range c.nodes[1:] {
		running.lacks(id)
	}
	if _, there := n.routes()[podCIDRs(id)[0]]; !there {
		c.Errorf("an agent that is down deleted a route")
	}
	began := time.Now()
	n.start()
	n.lacks(id)
	c.Logf("the routes of a deleted node are gone %.2f s after the start of the agent, load %s", time.Since(began).Seconds(), load())
	n.awaitReady()
	c.complete()
}

func (n *node) lacks(id int) {
	n.Helper()
	harness.Await(n, n.name+" to lack the routes of a deleted node", func() bool {
		routes := n.routes()
		return !slices.ContainsFunc(podCIDRs(id), func(cidr netip.Prefix) bool { _, there := routes[cidr]; return there })
	})
}

// outage restarts the API server while the agents run. No route disappears, and the agents learn of the next node.
func (c *cluster) outage() {
	c.Helper()
	var heard []*arrivals
	for _, n := range c.nodes {
		heard = append(heard, n.arrivals())
	}
	c.restart(3 * time.Second)
	back := time.Now()
	const id = 200
	_, err := c.join(object(id, "lan"), id)
	kerneltest.Must(c, err)
	c.other = append(c.other, id)
	for i, a := range heard {
		c.Logf("the API server is back: %s has the routes to a new node after %.1f s", c.nodes[i].name, a.await(c.T, podCIDRs(id)).Sub(back).Seconds())
		if gone := a.deleted(); gone > 0 {
			c.Errorf("%s deleted %d routes while the API server was away", c.nodes[i].name, gone)
		}
	}
	c.complete()
}

// restartWritesNothing restarts an agent without changes of the cluster. The monitor would notice any write.
func (c *cluster) restartWritesNothing() {
	c.Helper()
	n := c.nodes[1]
	n.restart()
	changes := n.monitor()
	c.remove(c.other[0])
	n.lacks(c.other[0])
	if got := changes(); len(got) < 2 {
		c.Errorf("the monitor sees nothing when routes are deleted: %q", got)
	}
}

// rights returns the requests of the agents. They requested only nodes, and their token permits nothing else.
func (c *cluster) rights() (agents []request) {
	c.Helper()
	for _, r := range c.requests() {
		if r.ObjectRef.Resource != "nodes" || r.Verb != "list" && r.Verb != "watch" || !strings.HasPrefix(r.UserAgent, "podlace-node/") {
			c.Errorf("not a request of an agent for nodes: %+v", r)
		}
		agents = append(agents, r)
	}
	account := c.client(c.token)
	for _, path := range []string{"pods", "services", "namespaces/podlace/secrets", "namespaces/podlace/configmaps"} {
		if err := account.Get().AbsPath("/api/v1/" + path).Do(context.Background()).Error(); !apierrors.IsForbidden(err) {
			c.Errorf("the agents may read %s: %v", path, err)
		}
	}
	for verb, err := range map[string]error{
		"create": account.Post().Resource("nodes").Body(object(300, "lan")).Do(context.Background()).Error(),
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
