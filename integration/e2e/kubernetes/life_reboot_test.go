// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// rebootNode ends a node as a power failure does, and starts it with its disk: plugins, conflist, leases. The agent must add all routes
// before the first ADD creates the bridge.
func (l *clusterLife) rebootNode(t *testing.T) {
	before := l.agentRoutes(t, "node2")
	if err := os.Remove(l.dir + "/node2/containerd.log"); err != nil {
		t.Fatal(err)
	}
	tr := l.startTraffic(t, pairWithoutNode2())
	begin := time.Now()
	old := netnsInode(l.places["node2"].Path)
	listening := make(chan *eventMonitor)
	go func() {
		defer close(listening)
		for now := old; now == old || now == 0; now = netnsInode(l.places["node2"].Path) {
			time.Sleep(time.Millisecond)
		}
		listening <- l.startMonitor(t, "node2")
	}()
	l.runScript(t, "reboot", "node2")
	m := <-listening
	if m == nil {
		return
	}
	awaitCondition(t, "bridge of the pods", func() bool { return m.countEvents("link cni0") > 0 })
	bridge := time.Since(begin)
	l.noteGroups(t) // the restarted node has another cgroup
	l.kubectl(t, "-n", namespace, "wait", "--for=jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/client2", "pod/server2", "--timeout=120s")
	l.findPods(t)
	back := time.Since(begin)
	tr.endTraffic(t, "node2")
	m.endMonitor(t)
	awaitCondition(t, "routes as before", func() bool { return l.agentRoutes(t, "node2") == before })
	at := slices.Index(m.events, "link cni0")
	routes := 0
	for _, e := range m.events[:at] {
		if e == "route" {
			routes++
		}
	}
	// For each of the two address families, the node has routes to two peers and a route to its own podCIDR.
	if routes != 6 {
		t.Errorf("when the first ADD made cni0, %d of 6 routes were there: %v", routes, m.events[:at])
	}
	t.Logf("the first ADD %.1f s after the reboot, after %d routes; all pods are back and reach each other after %.1f s; ADDs refused before: %d; load %s",
		bridge.Seconds(), routes, back.Seconds(), len(l.failedSandboxes(t, namespace)), loadAverage())
	l.checkReach(t)
}

// netnsInode returns the inode of the network namespace at a path, or 0 if the path is not a namespace.
func netnsInode(path string) uint64 {
	var of unix.Statfs_t
	var file unix.Stat_t
	if unix.Statfs(path, &of) != nil || of.Type != unix.NSFS_MAGIC || unix.Stat(path, &file) != nil {
		return 0
	}
	return file.Ino
}
