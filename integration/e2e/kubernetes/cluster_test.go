// SPDX-License-Identifier: Apache-2.0

// Package kubernetes_test runs Podlace in a real Kubernetes cluster of three nodes: `make cluster ARGS=-test`. The script
// scripts/cluster.sh runs the cluster.
//
//	KUBERNETES    folder of Kubernetes' programs and etcd
//	CONTAINERD    containerd of the nodes
//	IMAGES        folder of the images that the nodes have
//	MANIFEST      the manifest of Podlace
//	DNS           a DNS server for the cluster's names, for TestTool
package kubernetes_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// testCluster is a cluster that scripts/cluster.sh runs.
type testCluster struct {
	dir, script string
	env         []string
	families    []string // "4", "6"
	input       io.Closer
	cmd         *exec.Cmd
	groups      []string // cgroups of the cluster's machines
	sysctls     string   // the machine's previous sysctls
	killed      bool     // by the test
}

// startCluster runs a cluster until the end of the test. The nodes have no pod network yet.
func startCluster(t *testing.T, families string, env ...string) *testCluster {
	t.Helper()
	images := os.Getenv("IMAGES")
	if os.Getenv("KUBERNETES") == "" || images == "" || os.Getenv("MANIFEST") == "" {
		t.Skip("SKIP, no cluster: KUBERNETES, IMAGES or MANIFEST is not set; make cluster ARGS=-test has all")
	}
	script, err := filepath.Abs("../../../scripts/cluster.sh")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "podlace-cluster-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(images, filepath.Join(dir, "images")); err != nil {
		t.Fatal(err)
	}
	c := &testCluster{dir: dir, script: script, families: strings.Fields(families), cmd: exec.Command(script, "run", dir),
		sysctls: kubeletSysctls()}
	c.env = append(append(os.Environ(), "FAMILIES="+families), env...)
	c.cmd.Env, c.cmd.Stderr = c.env, os.Stderr
	input, err := c.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.input = input
	t.Cleanup(func() { c.stopCluster(t) })
	begin := time.Now()
	for lines := bufio.NewScanner(output); lines.Scan(); {
		if lines.Text() == "ready" {
			t.Logf("the API server answers and all nodes are registered after %.1f s", time.Since(begin).Seconds())
			c.noteGroups(t)
			return c
		}
	}
	t.Fatal("the cluster did not start")
	return nil
}

// machineNames returns the names of the control plane and of the nodes. Each of these machines has its own cgroup.
func (c *testCluster) machineNames() []string { return []string{"plane", "node1", "node2", "node3"} }

// machinePID returns the ID of a process in the namespaces of a machine.
func (c *testCluster) machinePID(t *testing.T, machine string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(c.dir, machine, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// cgroupOf returns the cgroup of a machine.
func (c *testCluster) cgroupOf(t *testing.T, machine string) string {
	t.Helper()
	data, err := os.ReadFile("/proc/" + c.machinePID(t, machine) + "/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(data), "podlace-node-")
	if !found {
		t.Fatalf("%s has no cgroup of its own: %s", machine, data)
	}
	number, _, _ := strings.Cut(rest, "\n")
	number, _, _ = strings.Cut(number, "/")
	return "podlace-node-" + number
}

func (c *testCluster) noteGroups(t *testing.T) {
	t.Helper()
	for _, m := range c.machineNames() {
		c.groups = append(c.groups, c.cgroupOf(t, m))
	}
}

// listRemains returns the cluster's cgroups and other objects that still exist on the host.
func (c *testCluster) listRemains() (left []string) {
	for _, g := range c.groups {
		found, _ := filepath.Glob("/sys/fs/cgroup/*/" + g)
		lone, _ := filepath.Glob("/sys/fs/cgroup/" + g)
		left = append(append(left, found...), lone...)
	}
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/self/mounts"} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			if data, err := os.ReadFile(f); err == nil && bytes.Contains(data, []byte(c.dir)) {
				left = append(left, f+": "+strings.ReplaceAll(string(data), "\x00", " "))
			}
		}
	}
	return left
}

// stopCluster ends the cluster and fails the test if anything of the cluster remains on the host.
func (c *testCluster) stopCluster(t *testing.T) {
	t.Helper()
	_ = c.input.Close()
	if err := c.cmd.Wait(); err != nil && !c.killed {
		t.Errorf("cluster.sh: %v", err)
	}
	left := c.listRemains()
	if now := kubeletSysctls(); now != c.sysctls {
		left = append(left, fmt.Sprintf("the sysctls are %s and were %s", now, c.sysctls))
	}
	if len(left) > 0 {
		t.Errorf("left on the machine: %s", strings.Join(left, "\n"))
	}
	if t.Failed() {
		t.Logf("the logs are in %s", c.dir)
		return
	}
	_ = os.RemoveAll(c.dir)
}

// kubeletSysctls returns sysctls of the whole host that a kubelet changes even from its own namespaces.
func kubeletSysctls() (values string) {
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"} {
		data, _ := os.ReadFile("/proc/sys/" + name)
		values += name + "=" + strings.TrimSpace(string(data)) + " "
	}
	return values
}

// runScript runs a command of cluster.sh, such as "exec" for a program in one machine, and returns its output.
func (c *testCluster) runScript(t *testing.T, verb string, args ...string) string {
	t.Helper()
	out, err := c.try(verb, "", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (c *testCluster) try(verb, input string, args ...string) (string, error) {
	cmd := exec.Command(c.script, append([]string{verb, c.dir}, args...)...)
	cmd.Env, cmd.Stdin = c.env, strings.NewReader(input)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s %s: %w: %s", verb, strings.Join(args, " "), err, stderr.Bytes())
	}
	return string(out), nil
}

func (c *testCluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return c.runScript(t, "exec", append([]string{"plane", "kubectl"}, args...)...)
}

// getObjects decodes the output of `kubectl get`.
func (c *testCluster) getObjects(t *testing.T, into any, args ...string) {
	t.Helper()
	if err := json.Unmarshal([]byte(c.kubectl(t, append([]string{"get", "-o", "json"}, args...)...)), into); err != nil {
		t.Fatal(err)
	}
}

// applyObjects sends objects to the API server.
func (c *testCluster) applyObjects(t *testing.T, objects ...any) {
	t.Helper()
	data, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": objects})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.try("exec", string(data), "plane", "kubectl", "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
}

// setUpNetwork applies Podlace's manifest and waits until all nodes are ready.
func (c *testCluster) setUpNetwork(t *testing.T) {
	t.Helper()
	before := c.countWatchLists(t)
	begin := time.Now()
	c.kubectl(t, "apply", "-f", os.Getenv("MANIFEST"))
	c.kubectl(t, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s")
	t.Logf("all nodes are Ready %.1f s after kubectl apply", time.Since(begin).Seconds())
	if now := c.countWatchLists(t); now < before+3 {
		t.Errorf("the API server has sent the list of nodes as a watch %d times before the agents came and %d times since", before, now-before)
	}
}

var watchLists = regexp.MustCompile(`(?m)^apiserver_watch_list_duration_seconds_count\{.*resource="nodes",scope="cluster".*\} (\d+)$`)

// countWatchLists returns how often the API server has streamed the list of all nodes through a watch (WatchList).
func (c *testCluster) countWatchLists(t *testing.T) int {
	t.Helper()
	found := watchLists.FindStringSubmatch(c.kubectl(t, "get", "--raw", "/metrics"))
	if found == nil {
		return 0
	}
	count, err := strconv.Atoi(found[1])
	if err != nil {
		t.Fatal(err)
	}
	return count
}
