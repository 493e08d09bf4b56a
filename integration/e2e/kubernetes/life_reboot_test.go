// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// reboot ends a node like a power failure, and starts it with the files of its disk: plugins, conflist, leases. No ADD creates a
// bridge there before all routes exist.
func (l *life) reboot(t *testing.T) {
	before := l.routes(t, "node2")
	if err := os.Remove(l.dir + "/node2/containerd.log"); err != nil {
		t.Fatal(err)
	}
	tr := l.traffic(t, aside())
	begin := time.Now()
	old := inode(l.places["node2"].Path)
	listening := make(chan *monitor)
	go func() {
		defer close(listening)
		for now := old; now == old || now == 0; now = inode(l.places["node2"].Path) {
			time.Sleep(time.Millisecond)
		}
		listening <- l.monitor(t, "node2")
	}()
	l.run(t, "reboot", "node2")
	m := <-listening
	if m == nil {
		return
	}
	await(t, "bridge of the pods", func() bool { return m.count("link cni0") > 0 })
	bridge := time.Since(begin)
	l.noteGroups(t) // the restarted node has another cgroup
	l.kubectl(t, "-n", namespace, "wait", "--for=jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/client2", "pod/server2", "--timeout=120s")
	l.findPods(t)
	back := time.Since(begin)
	tr.others(t, "node2")
	m.end(t)
	await(t, "routes as before", func() bool { return l.routes(t, "node2") == before })
	at := slices.Index(m.events, "link cni0")
	routes := 0
	for _, e := range m.events[:at] {
		if e == "route" {
			routes++
		}
	}
	// Two peers and the node's own podCIDR, each in two families.
	if routes != 6 {
		t.Errorf("when the first ADD made cni0, %d of 6 routes were there: %v", routes, m.events[:at])
	}
	t.Logf("the first ADD %.1f s after the reboot, after %d routes; all pods are back and reach each other after %.1f s; ADDs refused before: %d; load %s",
		bridge.Seconds(), routes, back.Seconds(), len(l.failures(t, namespace)), load())
	l.reach(t)
}

// inode returns the inode of the network namespace at a path, or 0.
func inode(path string) uint64 {
	var of unix.Statfs_t
	var file unix.Stat_t
	if unix.Statfs(path, &of) != nil || of.Type != unix.NSFS_MAGIC || unix.Stat(path, &file) != nil {
		return 0
	}
	return file.Ino
}
