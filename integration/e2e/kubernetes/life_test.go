// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
)

var (
	kills   = flag.Int("kills", 100, "TestClusterLife: how often an agent is killed")
	apiAway = flag.Duration("api-away", time.Minute, "TestClusterLife: how long the API server is away")
)

// eventLimit is how long to wait for an event on a slow machine. It is no performance target.
const eventLimit = 2 * time.Minute

// TestClusterLife: events such as a reboot cause only unavoidable packet losses, and no ADD fails.
func TestClusterLife(t *testing.T) {
	l := newLife(t)
	for _, e := range []struct {
		name string
		run  func(*clusterLife, *testing.T)
	}{
		{"agents killed", (*clusterLife).killAgents},
		{"API server away", (*clusterLife).stopAPIServer},
		{"nodes join and leave", (*clusterLife).joinNodes},
		{"link flap", (*clusterLife).flapLink},
		{"address changed", (*clusterLife).changeAddress},
		{"foreign daemon", (*clusterLife).foreignDaemon},
		{"podCIDR changed", (*clusterLife).changePodCIDR},
		{"reboot", (*clusterLife).rebootNode},
	} {
		t.Run(e.name, func(t *testing.T) {
			begin := time.Now()
			e.run(l, t)
			t.Logf("took %.0f s; load %s", time.Since(begin).Seconds(), loadAverage())
		})
	}
}

// clusterLife is a cluster with a client pod and a server pod on each node.
type clusterLife struct{ *testWorld }

func newLife(t *testing.T) *clusterLife {
	t.Helper()
	c := startCluster(t, "4 6")
	c.setUpNetwork(t)
	return c.startWorld(t)
}

// startWorld starts the pods of a cluster whose pod network works.
func (c *testCluster) startWorld(t *testing.T) *clusterLife {
	t.Helper()
	l := &clusterLife{&testWorld{testCluster: c, places: map[string]*netPlace{}}}
	l.addMachines(t)
	l.findPods(t)
	return l
}

// findPods creates the missing pods and finds the node and the namespace of each pod.
func (l *clusterLife) findPods(t *testing.T) {
	t.Helper()
	l.applyObjects(t, matrixPods()...)
	l.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
	l.addPods(t)
	tr := l.startTraffic(t, podPairs()...) // until each flow had a reply, so that the neighbour tables are filled
	awaitCondition(t, "replies of all pods", func() bool {
		for _, f := range tr.flows {
			if f.countReplies(t) == f.before {
				return false
			}
		}
		return true
	})
	close(tr.stop)
	tr.running.Wait()
}

// awaitCondition waits until a condition is true and returns the waiting time.
func awaitCondition(t *testing.T, what string, reached func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for !reached() {
		if time.Since(begin) > eventLimit {
			t.Fatalf("no %s after %v; load %s", what, eventLimit, loadAverage())
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(begin)
}

// agentPID returns the process ID of podlace-node on a node, or 0 if podlace-node does not run.
func (c *testCluster) agentPID(t *testing.T, node string) int {
	t.Helper()
	group := c.cgroupOf(t, node)
	files, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, f := range files {
		if name, err := os.ReadFile(f); err != nil || string(name) != "podlace-node\n" {
			continue
		}
		dir := filepath.Dir(f)
		if of, err := os.ReadFile(dir + "/cgroup"); err == nil && strings.Contains(string(of), group) {
			pid, _ := strconv.Atoi(filepath.Base(dir))
			return pid
		}
	}
	return 0
}

// signalAgent waits until a node's agent has a new process ID, and sends a signal to the agent.
func (c *testCluster) signalAgent(t *testing.T, node string, before int, s unix.Signal) (pid int) {
	t.Helper()
	awaitCondition(t, "agent on "+node, func() bool {
		pid = c.agentPID(t, node)
		return pid != 0 && pid != before
	})
	if err := unix.Kill(pid, s); err != nil {
		t.Fatalf("agent of %s: %v", node, err)
	}
	return pid
}

// awaitAgents waits until all agents are ready.
func (l *clusterLife) awaitAgents(t *testing.T) {
	t.Helper()
	l.kubectl(t, "-n", "podlace", "rollout", "status", "daemonset/podlace-node", "--timeout=120s")
}

// gatewayOf returns the gateway through which a node sends packets for an address, or else the link.
func (l *clusterLife) gatewayOf(t *testing.T, node, address string) (via string) {
	t.Helper()
	err := l.places[node].Do(func() error {
		routes, err := netlink.RouteGet(net.ParseIP(address))
		if err != nil || len(routes) == 0 {
			via = "nowhere"
			return nil
		}
		if via = routes[0].Gw.String(); routes[0].Gw == nil {
			link, err := netlink.LinkByIndex(routes[0].LinkIndex)
			if err != nil {
				return err
			}
			via = link.Attrs().Name
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return via
}

var unlike = regexp.MustCompile(` (nhid|id) \d+`)

// agentRoutes returns the agent's routes and nexthops on a node, without the IDs of the nexthops.
func (l *clusterLife) agentRoutes(t *testing.T, node string) string {
	t.Helper()
	out := l.runScript(t, "exec", node, "sh", "-c", fmt.Sprintf(
		"ip -4 route show proto %[1]d; ip -6 route show proto %[1]d; ip nexthop show proto %[1]d | sort", noderoutes.Protocol))
	return unlike.ReplaceAllString(out, "")
}

// allRoutes returns the agents' routes of all nodes.
func (l *clusterLife) allRoutes(t *testing.T) (all string) {
	t.Helper()
	for _, n := range l.machineNames()[1:] {
		all += n + ":\n" + l.agentRoutes(t, n)
	}
	return all
}
