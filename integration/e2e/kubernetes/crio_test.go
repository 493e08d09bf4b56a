// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"os"
	"strings"
	"testing"
)

// TestCRIO: all paths (see netPath) work in a cluster whose third node runs CRI-O, with the shipped manifest. CRI-O maps hostPorts itself
// and passes none to portmap, so they do not work if its mapping is disabled.
func TestCRIO(t *testing.T) {
	folder := os.Getenv("CRIO")
	if folder == "" {
		t.Skip("SKIP, no CRI-O: make cluster CRIO=1 ARGS=-test builds one")
	}
	c := startCluster(t, "4 6", "PROXY=nftables", "BRIDGE_NF=1", "CRIO="+folder)
	c.setUpNetwork(t)
	if got := c.kubectl(t, "get", "node", "node3", "-o", "jsonpath={.status.nodeInfo.containerRuntimeVersion}"); !strings.HasPrefix(got, "cri-o://") {
		t.Fatalf("node3 runs %q", got)
	}
	w := newWorld(t, c)
	for _, proxy := range []string{"nftables", "iptables"} {
		t.Run(proxy, func(t *testing.T) {
			s := clusterSetup{proxy: proxy, crio: true}
			c.setProxy(t, s)
			w.testMatrix(t, s)
		})
	}
	t.Run("disable_hostport_mapping", func(t *testing.T) { w.withoutHostPorts(t) })
}

// withoutHostPorts restarts CRI-O with disable_hostport_mapping and replaces the pod server3, which is then reachable, but not at its
// hostPort.
func (w *testWorld) withoutHostPorts(t *testing.T) {
	w.runScript(t, "exec", "node3", "sh", "-ec", `sed -i '/^\[crio.runtime\]/a disable_hostport_mapping = true' /run/node/crio.conf
		old=$(cat /run/node/crio.pid); kill $old
		until [ $(cat /run/node/crio.pid) != $old ] && crictl --runtime-endpoint unix:///run/crio/crio.sock version; do sleep 0.2; done`)
	w.kubectl(t, "-n", namespace, "delete", "pod", "server3", "--wait")
	w.applyObjects(t, matrixPods()...)
	w.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pod/server3", "--timeout=60s")
	w.addPods(t)
	serveName(t, "server3", w.places["server3"])
	s := clusterSetup{proxy: "iptables", crio: true}
	w.awaitPaths(s, podPaths())
	w.walkAll(t, s, podPaths())
	for _, p := range hostPortPaths("3", "1")[:6] {
		for _, f := range w.families {
			server, _, err := w.askServer(p.from, "tcp", w.targetOf(p, f), p.port, refusedLimit)
			if err == nil {
				t.Errorf("%s to %s, IPv%s: %s answers, and CRI-O maps no hostPorts", p.client, p.target, f, server)
			}
		}
	}
}
