// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"os"
	"strings"
	"testing"
	"time"
)

// Numbers of shell blocks in the section "Removing Podlace" of docs/CLUSTER.md. TestRemoval runs each line of each.
const (
	removeApply = iota
	removeNames
	removePods
	removeEnd
	removeBlocks
)

// otherConflist is a network of the reference plugins. Its file sorts after Podlace's.
const otherConflist = `{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "bridge", "bridge": "other0", "isGateway": true,
	"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.99.0.0/24"}]]}}]}`

// findLeft is a shell command that prints the state of Podlace that a node still has.
const findLeft = `ls -d /opt/cni/bin/podlace-* /etc/cni/net.d/*podlace* /run/podlace/* /run/podlace/.[!.]* /var/lib/cni/networks/*podlace* \
		/var/lib/cni/networks/*/podlace_boot /var/lib/cni/results/*podlace* 2>/dev/null
	ip -o link show cni0 2>/dev/null; ip -o link show podlace.vx 2>/dev/null
	ip -4 route show proto 142; ip -6 route show proto 142; ip nexthop show proto 142
	! command -v nft >/dev/null || nft list tables | grep podlace
	:`

// TestRemoval removes Podlace with the commands of docs/CLUSTER.md while pods run, with and without another pod network. No node keeps any
// of its state.
func TestRemoval(t *testing.T) {
	c := startCluster(t, "4 6")
	steps := documentedBlocks(t, "docs/CLUSTER.md", "Removing Podlace", "bash", removeBlocks)
	manifest, err := os.ReadFile(os.Getenv("MANIFEST"))
	if err != nil {
		t.Fatal(err)
	}
	c.writeRemoval(t, string(manifest))
	t.Run("without another network", func(t *testing.T) {
		c.setUpNetwork(t)
		c.startPods(t)
		c.runLines(t, "plane", steps[removeApply])
		c.kubectl(t, "wait", "--for=condition=Ready=false", "nodes", "--all", "--timeout=120s")
		c.awaitRemovalLog(t, steps[removeNames], "matrix/server1", "matrix/client3")
		c.runLines(t, "plane", steps[removePods])
		c.runLines(t, "plane", steps[removeEnd])
		c.checkClean(t)
	})
	t.Run("with another network", func(t *testing.T) {
		if os.Getenv("REFERENCE") == "" {
			t.Skip("SKIP, no other network: REFERENCE is not set; make cluster ARGS='-test -run TestRemoval' builds it")
		}
		c.setUpNetwork(t)
		c.startPods(t)
		for _, n := range c.machineNames()[1:] {
			c.runScript(t, "exec", n, "sh", "-ec", `cp "$0/bridge" "$0/host-local" /opt/cni/bin/
				echo "$1" >/etc/cni/net.d/new; mv /etc/cni/net.d/new /etc/cni/net.d/20-other.conflist`, os.Getenv("REFERENCE"), otherConflist)
		}
		c.runLines(t, "plane", steps[removeApply])
		c.awaitRemovalLog(t, steps[removeNames], "matrix/server1", "matrix/client3")
		c.kubectl(t, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s")
		c.runLines(t, "plane", steps[removePods])
		c.startPods(t)
		c.runLines(t, "plane", steps[removeEnd])
		c.checkClean(t)
		for _, n := range c.machineNames()[1:] {
			if leases := c.runScript(t, "exec", n, "ls", "/var/lib/cni/networks/other"); strings.Count(leases, "10.99.0.") != 2 {
				t.Errorf("%s: the leases of the other network are %s", n, leases)
			}
		}
	})
}

// startPods creates the client pods and server pods of the test matrix, and waits until the pods are ready.
func (c *testCluster) startPods(t *testing.T) {
	t.Helper()
	c.applyObjects(t, matrixPods()...)
	c.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
}

// awaitRemovalLog waits until the log of the removal names all the given pods.
func (c *testCluster) awaitRemovalLog(t *testing.T, lines string, pods ...string) {
	t.Helper()
	log := ""
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Second) {
		// `kubectl logs` fails while an agent's pod is being replaced, which has no log then.
		log, _ = c.try("exec", "", "plane", "env", "PATH="+os.Getenv("KUBERNETES")+":"+os.Getenv("PATH"), "bash", "-ec", lines)
		missing := 0
		for _, p := range pods {
			if !strings.Contains(log, p) {
				missing++
			}
		}
		if missing == 0 {
			return
		}
	}
	t.Fatalf("want the pods %s named: %s", pods, log)
}

// checkClean checks that no node has any state of Podlace.
func (c *testCluster) checkClean(t *testing.T) {
	t.Helper()
	for _, n := range c.machineNames()[1:] {
		if left := c.runScript(t, "exec", n, "sh", "-c", findLeft); left != "" {
			t.Errorf("%s still has\n%s", n, left)
		}
	}
}
