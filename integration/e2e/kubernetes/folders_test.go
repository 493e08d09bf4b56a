// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"testing"
	"time"
)

// TestFolders removes or moves folders of the node while the agent runs, as `kubeadm reset` does. The agent exits, and its next container
// mounts and fills the current folders without an administrator.
func TestFolders(t *testing.T) {
	c := startCluster(t, "4 6")
	c.setUpNetwork(t)
	for what, step := range map[string][2]string{
		"node1": {"rm -rf /etc/cni/net.d", "test -s /etc/cni/net.d/10-podlace.conflist"},
		"node2": {"mv /opt/cni/bin /opt/cni/bin.old", "test -x /opt/cni/bin/podlace-pod"},
		"node3": {"rm -rf /run/podlace", "test -s /run/podlace/node.json"},
	} {
		begin := time.Now()
		c.runScript(t, "exec", what, "sh", "-c", step[0])
		for end := begin.Add(2 * time.Minute); ; time.Sleep(time.Second) {
			if _, err := c.try("exec", "", what, "sh", "-c", step[1]); err == nil {
				t.Logf("%s: %s: back after %.0f s", what, step[0], time.Since(begin).Seconds())
				break
			} else if time.Now().After(end) {
				t.Fatalf("%s: %s: %v\n%s", what, step[0], err, c.kubectl(t, "-n", "podlace", "describe", "pods"))
			}
		}
	}
	c.applyObjects(t, matrixPods()...)
	c.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
}
