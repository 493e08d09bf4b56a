// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
)

// endTraffic ends the flows and returns the longest time without a reply from or to the given node. A flow between two others must not have
// lost a packet.
func (r *echoTraffic) endTraffic(t *testing.T, node string) (outage time.Duration) {
	t.Helper()
	lost, most := r.endFlows(t, node)
	if lost != 0 {
		t.Errorf("%d packets lost between other nodes than %s, want none", lost, node)
	}
	return time.Duration(most) * requestPace
}

// checkReach fails the test unless all pods reach each other without losses.
func (l *clusterLife) checkReach(t *testing.T) {
	t.Helper()
	tr := l.startTraffic(t, podPairs()...)
	time.Sleep(100 * requestPace)
	if lost, _ := tr.endFlows(t, ""); lost != 0 {
		t.Errorf("%d packets lost after the recovery", lost)
	}
}

// foreignDaemon runs a program that repeatedly deletes the agent's routes on a node.
func (l *clusterLife) foreignDaemon(t *testing.T) {
	before := l.agentRoutes(t, "node2")
	tr := l.startTraffic(t, podPairs()...)
	m := l.startMonitor(t, "node2")
	l.runScript(t, "exec", "node2", "sh", "-c", fmt.Sprintf(`for i in $(seq 80); do
		ip nexthop flush proto %[1]d; ip -4 route flush proto %[1]d; ip -6 route flush proto %[1]d; sleep 0.1; done`, noderoutes.Protocol))
	back := awaitCondition(t, "routes after the foreign daemon", func() bool { return l.agentRoutes(t, "node2") == before })
	outage := tr.endTraffic(t, "node2")
	m.endMonitor(t)
	deleted := m.countEvents("-nexthop")
	t.Logf("%d nexthops deleted in 80 rounds; all back %.1f s after the last; packets of %.1f s lost to and from node2; load %s", deleted, back.Seconds(),
		outage.Seconds(), loadAverage())
	if deleted < 20 || outage == 0 {
		t.Errorf("%d nexthops deleted, and packets of %v lost: want each of 4 several times, and a loss", deleted, outage)
	}
	l.checkReach(t)
}

// flapLink sets a node's link down and up, and restores the routes that are not the agent's, as a network manager does.
func (l *clusterLife) flapLink(t *testing.T) {
	before := l.agentRoutes(t, "node2")
	tr := l.startTraffic(t, podPairs()...)
	l.runScript(t, "exec", "node2", "ip", "link", "set", "eth0", "down")
	if down := l.agentRoutes(t, "node2"); strings.Contains(down, "192.0.2.11") {
		t.Errorf("with eth0 down there are routes by eth0: %s", down)
	}
	time.Sleep(time.Second)
	l.runScript(t, "exec", "node2", "sh", "-ec", `ip link set eth0 up
		ip address add 2001:db8::12/64 dev eth0 nodad
		ip route add default via 192.0.2.1
		ip -6 route add default via 2001:db8::1`)
	back := awaitCondition(t, "routes after the link", func() bool { return l.agentRoutes(t, "node2") == before })
	outage := tr.endTraffic(t, "node2")
	t.Logf("all routes are back %.2f s after the link; packets of %.1f s lost to and from node2, of which the link was down 1 s; load %s",
		back.Seconds(), outage.Seconds(), loadAverage())
	l.checkReach(t)
}

// watchNode waits until the API server reports the wanted value for a node, and returns the time of this report.
func (c *testCluster) watchNode(t *testing.T, node, path, wanted string) <-chan time.Time {
	t.Helper()
	cmd := exec.Command(c.script, "exec", c.dir, "plane", "kubectl", "get", "node", node, "--watch", "-o", "jsonpath={"+path+"}{\"\\n\"}")
	cmd.Env = c.env
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	told := make(chan time.Time, 1)
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if strings.Contains(lines.Text()+" ", wanted+" ") {
				told <- time.Now()
				break
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	return told
}

// restartKubelet replaces a text in the arguments of a node's kubelet and kills it, so that it restarts with them.
func (c *testCluster) restartKubelet(t *testing.T, node, old, now string) {
	t.Helper()
	file := filepath.Join(c.dir, node, "services", "kubelet")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if changed := strings.Replace(string(text), old, now, 1); changed != string(text) {
		if err := os.WriteFile(file+".new", []byte(changed), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	c.runScript(t, "exec", node, "sh", "-c", "kill -KILL $(cat /run/node/kubelet.pid)")
}

// changeAddress replaces a node's addresses, which the kubelet reports, and restores them in the end.
func (l *clusterLife) changeAddress(t *testing.T) {
	old, now := [2]string{"192.0.2.12", "2001:db8::12"}, [2]string{"192.0.2.22", "2001:db8::22"}
	before := l.allRoutes(t)
	for range 2 {
		tr := l.startTraffic(t, podPairs()...)
		told := l.watchNode(t, "node2", ".status.addresses[*].address", now[0])
		begin := time.Now()
		l.runScript(t, "exec", "node2", "sh", "-ec", fmt.Sprintf(`ip address flush dev eth0 scope global
			ip address add %s/24 dev eth0
			ip address add %s/64 dev eth0 nodad
			ip route replace default via 192.0.2.1
			ip -6 route replace default via 2001:db8::1`, now[0], now[1]))
		l.restartKubelet(t, "node2", "--node-ip="+strings.Join(old[:], ","), "--node-ip="+strings.Join(now[:], ","))
		var known time.Time
		select {
		case known = <-told:
		case <-time.After(eventLimit):
			t.Fatalf("the API server does not know of %s after %v; load %s", now[0], eventLimit, loadAverage())
		}
		awaitCondition(t, "routes to the new address", func() bool {
			return l.gatewayOf(t, "node1", l.places["server2"].address["4"]) == now[0] &&
				l.gatewayOf(t, "node1", l.places["server2"].address["6"]) == now[1] &&
				l.gatewayOf(t, "node2", l.places["server1"].address["4"]) == "192.0.2.11"
		})
		routed := time.Since(known)
		l.awaitFlows(t, tr, "node2")
		answers := time.Since(known)
		outage := tr.endTraffic(t, "node2")
		t.Logf("address %s: the API server knew %.1f s later; node1 routed to it %.0f ms after that, all pods answered %.0f ms after that;"+
			" packets of %.1f s lost to and from node2; load %s", now[0], known.Sub(begin).Seconds(), float64(routed.Milliseconds()),
			float64(answers.Milliseconds()), outage.Seconds(), loadAverage())
		old, now = now, old
	}
	awaitCondition(t, "routes as before", func() bool { return l.allRoutes(t) == before })
	l.checkReach(t)
}

// awaitFlows waits until each flow of a node has received one more reply.
func (l *clusterLife) awaitFlows(t *testing.T, tr *echoTraffic, node string) {
	t.Helper()
	number := strings.TrimPrefix(node, "node")
	for _, f := range tr.flows {
		if strings.HasSuffix(f.from, number) || strings.HasSuffix(f.to, number) {
			had := f.countReplies(t)
			awaitCondition(t, "replies: "+f.String(), func() bool { return f.countReplies(t) > had })
		}
	}
}

// changePodCIDR deletes a Node object and creates it again with other podCIDRs. The old pods of the node are deleted.
func (l *clusterLife) changePodCIDR(t *testing.T) {
	oldPod := l.places["server2"].address["4"]
	tr := l.startTraffic(t, pairWithoutNode2())
	l.runScript(t, "exec", "node2", "sh", "-c", "touch /run/node/stay-down; kill -KILL $(cat /run/node/kubelet.pid)")
	l.kubectl(t, "delete", "node", "node2")
	gone := awaitCondition(t, "end of the routes to node2", func() bool { return l.gatewayOf(t, "node1", oldPod) == "192.0.2.1" })
	cidrs := []string{"10.244.77.0/24", "fd00:10:244:77::/64"}
	l.applyObjects(t, map[string]any{"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": "node2", "labels": map[string]any{"kubernetes.io/os": "linux"}},
		"spec":     map[string]any{"podCIDR": cidrs[0], "podCIDRs": cidrs}})
	l.kubectl(t, "-n", namespace, "delete", "pod", "client2", "server2", "--force", "--wait=false")
	l.runScript(t, "exec", "node2", "rm", "/run/node/stay-down")
	begin := time.Now()
	routed := awaitCondition(t, "routes to the new podCIDR", func() bool {
		return l.gatewayOf(t, "node1", "10.244.77.9") == "192.0.2.12" && l.gatewayOf(t, "node1", "fd00:10:244:77::9") == "2001:db8::12"
	})
	if via := l.gatewayOf(t, "node1", oldPod); via != "192.0.2.1" {
		t.Errorf("node1 sends packets for the old podCIDR to %s", via)
	}
	l.findPods(t)
	answers := time.Since(begin)
	tr.endTraffic(t, "node2")
	for _, name := range []string{"client2", "server2"} {
		if got := l.places[name].address["4"]; !strings.HasPrefix(got, "10.244.77.") {
			t.Errorf("%s has the address %s after the change to 10.244.77.0/24", name, got)
		}
	}
	var node struct{ PodCIDRs []string }
	if err := json.Unmarshal([]byte(l.runScript(t, "exec", "node2", "cat", "/run/podlace/node.json")), &node); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(node.PodCIDRs), fmt.Sprint(cidrs); got != want {
		t.Errorf("node.json has %s, want %s", got, want)
	}
	t.Logf("routes gone %.1f s after the Node; %.1f s from the start of the kubelet to the routes of node1, %.1f s to replies of the new pods to"+
		" pods of all nodes; load %s", gone.Seconds(), routed.Seconds(), answers.Seconds(), loadAverage())
	l.awaitAgents(t)
	l.checkReach(t)
}
