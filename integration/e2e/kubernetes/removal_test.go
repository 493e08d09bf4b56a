// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"os"
	"strings"
	"testing"
	"time"
)

// The shell blocks of "Removing Podlace" in docs/CLUSTER.md, in order. TestRemoval runs each line.
const (
	removeApply = iota
	removeNames
	removePods
	removeEnd
	removeBlocks
)

// otherConflist configures a network of the reference plugins. Its name sorts after Podlace's.
const otherConflist = `{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "bridge", "bridge": "other0", "isGateway": true,
	"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.99.0.0/24"}]]}}]}`

// findLeft prints Podlace's state on a node.
const findLeft = `ls -d /opt/cni/bin/podlace-* /etc/cni/net.d/*podlace* /run/podlace/* /run/podlace/.[!.]* /var/lib/cni/networks/*podlace* \
		/var/lib/cni/networks/.podlace* /var/lib/cni/results/*podlace* 2>/dev/null
	ip -o link show cni0 2>/dev/null; ip -o link show podlace.vx 2>/dev/null
	ip -4 route show proto 142; ip -6 route show proto 142; ip nexthop show proto 142
	! command -v nft >/dev/null || nft list tables | grep podlace
	:`

// TestRemoval removes Podlace with the commands of docs/CLUSTER.md while its pods run, once without and once with another network.
// Afterwards no state of Podlace remains on any node.
func TestRemoval(t *testing.T) {
	c := start(t, "4 6")
	steps := documented(t, "Removing Podlace", removeBlocks)
	manifest, err := os.ReadFile(os.Getenv("MANIFEST"))
	if err != nil {
		t.Fatal(err)
	}
	c.writeRemoval(t, string(manifest))
	t.Run("without another network", func(t *testing.T) {
		c.network(t)
		c.startPods(t)
		c.follow(t, "plane", steps[removeApply])
		c.kubectl(t, "wait", "--for=condition=Ready=false", "nodes", "--all", "--timeout=120s")
		c.waitsFor(t, steps[removeNames], "matrix/server1", "matrix/client3")
		c.follow(t, "plane", steps[removePods])
		c.follow(t, "plane", steps[removeEnd])
		c.clean(t)
	})
	t.Run("with another network", func(t *testing.T) {
		if os.Getenv("REFERENCE") == "" {
			t.Skip("SKIP, no other network: REFERENCE is not set; make cluster ARGS='-test -run TestRemoval' builds it")
		}
		c.network(t)
		c.startPods(t)
		for _, n := range c.machines()[1:] {
			c.run(t, "exec", n, "sh", "-ec", `cp "$0/bridge" "$0/host-local" /opt/cni/bin/
				echo "$1" >/etc/cni/net.d/new; mv /etc/cni/net.d/new /etc/cni/net.d/20-other.conflist`, os.Getenv("REFERENCE"), otherConflist)
		}
		c.follow(t, "plane", steps[removeApply])
		c.waitsFor(t, steps[removeNames], "matrix/server1", "matrix/client3")
		c.kubectl(t, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s")
		c.follow(t, "plane", steps[removePods])
		c.startPods(t)
		c.follow(t, "plane", steps[removeEnd])
		c.clean(t)
		for _, n := range c.machines()[1:] {
			if leases := c.run(t, "exec", n, "ls", "/var/lib/cni/networks/other"); strings.Count(leases, "10.99.0.") != 2 {
				t.Errorf("%s: the leases of the other network are %s", n, leases)
			}
		}
	})
}

// startPods starts the pods of the matrix.
func (c *cluster) startPods(t *testing.T) {
	t.Helper()
	c.apply(t, pods()...)
	c.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
}

// waitsFor waits until the log of the removal names pods.
func (c *cluster) waitsFor(t *testing.T, lines string, pods ...string) {
	t.Helper()
	log := ""
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Second) {
		// An agent's pod that is being replaced has no log.
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

// clean checks that no state of Podlace remains on any node.
func (c *cluster) clean(t *testing.T) {
	t.Helper()
	for _, n := range c.machines()[1:] {
		if left := c.run(t, "exec", n, "sh", "-c", findLeft); left != "" {
			t.Errorf("%s still has\n%s", n, left)
		}
	}
}
