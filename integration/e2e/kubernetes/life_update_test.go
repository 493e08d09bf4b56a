// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
)

var updateFrom = flag.String("update-from", "", "TestUpdate: the revision of the older image; default: the first with the whole agent")

const olderImage = "localhost/podlace:older"

// TestUpdate updates a cluster from an earlier commit's manifest, whose conflist is a chain, to this commit's. Meanwhile, pods exchange
// traffic, and others are created and deleted.
func TestUpdate(t *testing.T) {
	shipped := shippedManifest(t)
	image, older := buildOlder(t)
	addImage(t, image)
	c := startCluster(t, "4 6")
	if _, err := c.try("exec", older, "plane", "kubectl", "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	c.kubectl(t, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s")
	l := c.startWorld(t)
	l.awaitAgents(t)
	files := func() string {
		return l.runScript(t, "exec", "node1", "sh", "-c", "sha256sum /opt/cni/bin/podlace-bridge; cat /etc/cni/net.d/10-podlace.conflist")
	}
	before := files()
	l.replaceAgents(t, func() {
		if _, err := l.try("exec", shipped, "plane", "kubectl", "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	})
	after := files()
	sum, conflist, _ := strings.Cut(after, "\n")
	if strings.HasPrefix(before, sum) || strings.Contains(before, plugin.PodType) || !strings.Contains(conflist, plugin.PodType) {
		t.Errorf("the plugins and the conflist were\n%s\nand are\n%s", before, after)
	}
}

// TestTakeOver applies the manifest to a cluster with manual routes (protocol boot), which become the agent's.
func TestTakeOver(t *testing.T) {
	shipped := shippedManifest(t)
	// The router has manual routes to the pods of all nodes, so the node in the other subnet needs no tunnel.
	ours := strings.Replace(shipped, `"offLink": "vxlan"`, `"offLink": "fabric", "adopt": ["boot"]`, 1)
	if ours == shipped {
		t.Fatal("the manifest sets no offLink to vxlan")
	}
	c := startCluster(t, "4 6")
	c.runScript(t, "byhand")
	c.kubectl(t, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s")
	l := c.startWorld(t)
	l.replaceAgents(t, func() {
		if _, err := l.try("exec", ours, "plane", "kubectl", "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
		awaitCondition(t, "DaemonSet", func() bool { return l.agentPID(t, "node1") != 0 })
	})
	if routes := l.agentRoutes(t, "node1"); strings.Count(routes, "192.0.2.12") == 0 || strings.Count(routes, "2001:db8::12") == 0 {
		t.Errorf("the agent of node1 has not taken over the routes to node2:\n%s", routes)
	}
}

// replaceAgents applies a change that replaces the agents, and waits for the new ones. No packet may be lost and no ADD may fail.
func (l *clusterLife) replaceAgents(t *testing.T, change func()) {
	t.Helper()
	var monitors []*eventMonitor
	for _, n := range l.machineNames()[1:] {
		monitors = append(monitors, l.startMonitor(t, n))
	}
	tr, ch := l.startTraffic(t, podPairs()...), l.churn(t)
	time.Sleep(churnEvery)
	begin := time.Now()
	change()
	l.awaitAgents(t)
	took := time.Since(begin)
	time.Sleep(churnEvery)
	lost, _ := tr.endFlows(t, "")
	ch.endChurn(t)
	changes := 0
	for _, m := range monitors {
		changes += m.endMonitor(t)
	}
	t.Logf("all agents replaced in %.0f s, with %d changes of routes and nexthops; load %s", took.Seconds(), changes, loadAverage())
	if lost != 0 {
		t.Errorf("%d packets lost, want none", lost)
	}
}

// shippedManifest returns the shipped manifest.
func shippedManifest(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(os.Getenv("MANIFEST"))
	if err != nil {
		t.Skipf("SKIP, no cluster: MANIFEST: %v; make cluster ARGS=-test has it", err)
	}
	return string(data)
}

// addImage adds an image to the nodes of the test.
func addImage(t *testing.T, archive string) {
	t.Helper()
	dir := t.TempDir()
	all, err := filepath.Glob(os.Getenv("IMAGES") + "/*.tar")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(all, archive) {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			err = os.Symlink(path, filepath.Join(dir, filepath.Base(path)))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("IMAGES", dir)
}

// buildOlder builds the image of an earlier commit for this machine's architecture only, and its manifest.
func buildOlder(t *testing.T) (archive, manifest string) {
	t.Helper()
	run := func(dir, name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	root := run(".", "git", "rev-parse", "--show-toplevel")
	revision := *updateFrom
	if revision == "" {
		if revision = run(root, "git", "log", "-1", "--diff-filter=A", "--format=%H", "--", "plugins/podlace-node/README.md"); revision == "" {
			t.Skip("SKIP, no older image: the history of this clone does not go back to the first agent")
		}
	}
	begin, dir := time.Now(), t.TempDir()
	tree := filepath.Join(dir, "tree")
	run(root, "git", "worktree", "add", "--detach", tree, revision)
	t.Cleanup(func() { run(root, "git", "worktree", "remove", "--force", tree) })
	programs := filepath.Join(dir, "programs")
	run(tree, "go", "build", "-trimpath", "-ldflags=-s -w", "-buildvcs=false", "-o", programs+"/", "./plugins/...")
	if err := os.Rename(programs+"/podlace-node", dir+"/podlace-node"); err != nil {
		t.Fatal(err)
	}
	archive = filepath.Join(dir, "older.tar")
	run(root+"/scripts/image", "go", "run", ".", "pack", "-name", olderImage, "-out", archive, "-entrypoint", "/podlace-node",
		"/podlace-node="+dir+"/podlace-node", "/plugins="+programs)
	manifest = run(root+"/scripts/image", "go", "run", ".", "manifest", "-conf", tree+"/conf/cluster", "-image", olderImage,
		"-component", "vxlan")
	t.Logf("the image of %.12s took %.0f s; load %s", revision, time.Since(begin).Seconds(), loadAverage())
	return archive, manifest
}
