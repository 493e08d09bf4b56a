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

	"github.com/podlace/podlace/pkg/noderoutes"
)

var (
	kills   = flag.Int("kills", 100, "TestClusterLife: how often an agent is killed")
	apiAway = flag.Duration("api-away", time.Minute, "TestClusterLife: how long the API server is away")
)

// patience is the maximum time that the tests wait for an expected event. It is not a performance figure, because a machine may be
// slow.
const patience = 2 * time.Minute

// TestClusterLife: each event of a cluster's life loses only the packets that it must lose, and no ADD.
func TestClusterLife(t *testing.T) {
	l := newLife(t)
	for _, e := range []struct {
		name string
		run  func(*life, *testing.T)
	}{
		{"agents killed", (*life).agentsKilled},
		{"API server away", (*life).apiServerAway},
		{"nodes join and leave", (*life).nodesJoin},
		{"link flap", (*life).linkFlap},
		{"address changed", (*life).addressChanged},
		{"foreign daemon", (*life).foreignDaemon},
		{"podCIDR changed", (*life).podCIDRChanged},
		{"reboot", (*life).reboot},
	} {
		t.Run(e.name, func(t *testing.T) {
			begin := time.Now()
			e.run(l, t)
			t.Logf("took %.0f s; load %s", time.Since(begin).Seconds(), load())
		})
	}
}

// life is a world with a client and a server on each node.
type life struct{ *world }

func newLife(t *testing.T) *life {
	t.Helper()
	c := start(t, "4 6")
	c.network(t)
	return c.startWorld(t)
}

// startWorld starts the pods once a network exists.
func (c *cluster) startWorld(t *testing.T) *life {
	t.Helper()
	l := &life{&world{cluster: c, places: map[string]*place{}}}
	l.addMachines(t)
	l.findPods(t)
	return l
}

// findPods creates the missing pods and finds the node of each.
func (l *life) findPods(t *testing.T) {
	t.Helper()
	l.apply(t, pods()...)
	l.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
	l.addPods(t)
	tr := l.traffic(t, pairs()...) // until each flow had a reply, so that the neighbour tables are filled
	await(t, "replies of all pods", func() bool {
		for _, f := range tr.flows {
			if f.replies(t) == f.before {
				return false
			}
		}
		return true
	})
	close(tr.stop)
	tr.running.Wait()
}

// await returns the time until a condition is true.
func await(t *testing.T, what string, reached func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for !reached() {
		if time.Since(begin) > patience {
			t.Fatalf("no %s after %v; load %s", what, patience, load())
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(begin)
}

// agent returns the process ID of podlace-node on a node, or 0.
func (c *cluster) agent(t *testing.T, node string) int {
	t.Helper()
	group := c.group(t, node)
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

// signal sends a signal to a node's agent once the process ID differs from the previous one.
func (c *cluster) signal(t *testing.T, node string, before int, s unix.Signal) (pid int) {
	t.Helper()
	await(t, "agent on "+node, func() bool {
		pid = c.agent(t, node)
		return pid != 0 && pid != before
	})
	if err := unix.Kill(pid, s); err != nil {
		t.Fatalf("agent of %s: %v", node, err)
	}
	return pid
}

// settled waits until all agents are ready.
func (l *life) settled(t *testing.T) {
	t.Helper()
	l.kubectl(t, "-n", "podlace", "rollout", "status", "daemonset/podlace-node", "--timeout=120s")
}

// gateway returns the address or else the link to which a node sends packets for an address.
func (l *life) gateway(t *testing.T, node, address string) (via string) {
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

// routes returns the agent's routes and nexthops on a node, without IDs.
func (l *life) routes(t *testing.T, node string) string {
	t.Helper()
	out := l.run(t, "exec", node, "sh", "-c", fmt.Sprintf(
		"ip -4 route show proto %[1]d; ip -6 route show proto %[1]d; ip nexthop show proto %[1]d | sort", noderoutes.Protocol))
	return unlike.ReplaceAllString(out, "")
}

// allRoutes returns the routes of all nodes.
func (l *life) allRoutes(t *testing.T) (all string) {
	t.Helper()
	for _, n := range l.machines()[1:] {
		all += n + ":\n" + l.routes(t, n)
	}
	return all
}
