// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/store"
)

func (l *lab) runCmd(args ...string) (exit int, stdout, stderr string) {
	var out, err bytes.Buffer
	exit = Main(args, &out, &err)
	return exit, out.String(), err.String()
}

// startProcess starts the agent as a child process with the lab's plugins, configuration and API server, and more flags.
func (l *lab) startProcess(flags ...string) *exec.Cmd {
	l.Helper()
	cmd := l.agentCommand(flags...)
	kerneltest.Must(l, cmd.Start())
	return cmd
}

func (l *lab) agentCommand(flags ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", append([]string{"run", "--node-name", l.Node, "--config", l.Config, "--kubeconfig", l.Kubeconfig,
		"--plugins", l.Plugins, "--http", "unix:" + l.dir + "/http"}, flags...)...)
	cmd.Env, cmd.Stderr = append(os.Environ(), agentEnv+"=1"), l.log
	return cmd
}

// TestRemove: "podlace-node remove" fails while the agent runs. Afterwards it leaves the node as it was before the first start, except for
// forwarding, which other programs may need.
func TestRemove(t *testing.T) {
	l := newLab(t, `"takeOver": true`)
	kerneltest.Must(t, exec.Command("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1").Run())
	l.put("net.d/05-other.conflist", otherConflist)
	l.put("net.d/99-later.conf", "{}")
	l.put("bin/other", "")
	opt := snapshot.Options{Dirs: []string{store.Root, l.dir}, Ignore: regexp.MustCompile(`/run/podlace(/\.node\.lock)?$|/bin/loopback|/run/podlace/\.node\.lock`)}
	before, err := snapshot.Take(opt)
	kerneltest.Must(t, err)
	l.ready()
	if l.read("net.d/05-other.conflist"+backup) != otherConflist || l.read("net.d/05-other.conflist") != "" ||
		l.read("net.d/99-later.conf") != "{}" {
		t.Error("the other conflist was not taken over, or an unrelated one was")
	}
	l.stop()
	exit, out, stderr := l.runCmd("remove", "--config", l.Config)
	if exit != 0 || !strings.Contains(out, "put back "+l.dir+"/net.d/05-other.conflist\nremoved "+l.dir+"/net.d/"+conflistName+", as ") ||
		strings.Index(out, conflistName) > strings.Index(out, "removed routes") ||
		strings.Index(out, "node.json") > strings.Index(out, "podlace-bridge") {
		t.Errorf("exit %d: %s%s", exit, out, stderr)
	}
	after, err := snapshot.Take(opt)
	kerneltest.Must(t, err)
	if diff := snapshot.Diff(before, after); len(diff) > 0 {
		t.Errorf("left: %q", diff)
	}
	if exit, out, stderr = l.runCmd("remove", "--config", l.Config); exit != 0 || out != "" {
		t.Errorf("again: exit %d: %s%s", exit, out, stderr)
	}
}

const otherConflist = `{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "other"}]}`

// writeRecord writes a record of the bridge plugin for a pod with the given path of its network namespace.
func (l *lab) writeRecord(id, pod, netns string) {
	l.Helper()
	kerneltest.Must(l, os.MkdirAll(store.Root+"/podlace", 0o700), os.WriteFile(store.Root+"/podlace/bridge-"+attachment.Key{Network: "podlace",
		ContainerID: id, IfName: "eth0"}.Hash(), fmt.Appendf(nil, `{"format": 1, "plugin": "bridge", "network": "podlace", "containerID": %q, "ifname": "eth0",
		"pod": %q, "netns": %q}`, id, pod, netns), 0o600))
}

// TestRemoveWithPods: on a node with running pods and no other network, the command removes node.json, so that no new pod starts. It keeps
// what the pods need for packets and DEL, and prints their names.
func TestRemoveWithPods(t *testing.T) {
	l := newLab(t).ready()
	l.stop()
	l.writeRecord("a", "shop/web-1", l.lan.Path)
	l.writeRecord("b", "shop/web-2", l.lan.Path)
	exit, out, stderr := l.runCmd("remove", "--config", l.Config)
	if exit == 0 || !strings.Contains(stderr, "pods that still need Podlace") || !strings.Contains(stderr, "shop/web-1, shop/web-2") ||
		len(l.routes()) == 0 || l.read("net.d/"+conflistName) == "" || l.read("bin/podlace-bridge") == "" || l.node().PodCIDRs != nil {
		t.Errorf("exit %d: %s%s", exit, out, stderr)
	}
	l.put("net.d/20-other.conflist", otherConflist)
	exit, out, stderr = l.runCmd("remove", "--config", l.Config)
	if exit == 0 || l.read("net.d/"+conflistName) != "" || len(l.routes()) == 0 ||
		!strings.Contains(out, "removed "+l.dir+"/net.d/"+conflistName+", as "+l.dir+"/net.d/20-other.conflist is there") {
		t.Errorf("another network came: exit %d: %s%s", exit, out, stderr)
	}
}

// TestRemoveNamed: while another conflist, or a pod in libcni's cache, names a plugin, nothing that pods need is removed.
func TestRemoveNamed(t *testing.T) {
	l := newLab(t).ready()
	l.stop()
	const mine = "net.d/20-mine.conflist"
	const config = `{"cniVersion": "1.0.0", "name": "mine", "plugins": [{"type": "podlace-portmap"}]}`
	l.put(mine, config)
	const cache = "/var/lib/cni/results"
	t.Cleanup(func() { kerneltest.Must(t, os.RemoveAll(cache)) })
	cached, err := json.Marshal(map[string]any{"kind": "cniCacheV1", "containerId": "a", "ifName": "eth0", "networkName": "mine",
		"config": []byte(config)})
	kerneltest.Must(t, err, os.MkdirAll(cache, 0o755), os.WriteFile(cache+"/mine-a-eth0", cached, 0o600))
	for _, file := range []string{l.dir + "/" + mine, cache + "/mine-a-eth0"} {
		exit, out, stderr := l.runCmd("remove", "--config", l.Config)
		if exit == 0 || !strings.Contains(stderr, file+" names podlace-portmap: ") || l.read("bin/podlace-portmap") == "" ||
			len(l.routes()) == 0 {
			t.Errorf("exit %d: %s%s", exit, out, stderr)
		}
		kerneltest.Must(t, os.Remove(file))
	}
	if exit, out, stderr := l.runCmd("remove", "--config", l.Config); exit != 0 || l.read("bin/podlace-pod") != "" {
		t.Errorf("exit %d: %s%s", exit, out, stderr)
	}
}

// TestRemoveDead: attachments whose namespace is gone are deleted, because another network's DEL would not do it. If the folder of the
// namespace files is invisible, none counts as gone.
func TestRemoveDead(t *testing.T) {
	l := newLab(t)
	self, err := os.ReadFile("/proc/self/exe")
	kerneltest.Must(t, err, os.WriteFile(l.dir+"/plugins/bridge", self, 0o755))
	l.ready()
	l.stop()
	l.put("net.d/05-other.conflist", otherConflist)
	gone := l.dir + "/net.d/cni-gone"
	l.writeRecord("a", "shop/web-1", gone)
	l.writeRecord("b", "shop/web-2", "/nowhere/netns/cni-2")
	exit, out, stderr := l.runCmd("remove", "--config", l.Config)
	if exit == 0 || !strings.Contains(stderr, "(1); delete them") || strings.Contains(stderr, "web-1") ||
		!strings.Contains(stderr, "shop/web-2") {
		t.Errorf("exit %d: %s%s", exit, out, stderr)
	}
	l.writeRecord("b", "shop/web-2", gone)
	if exit, out, stderr = l.runCmd("remove", "--config", l.Config); exit != 0 || l.read("bin/podlace-bridge") != "" || len(l.routes()) > 0 {
		t.Errorf("exit %d: %s%s", exit, out, stderr)
	}
}

// TestRemoveFails: a failed removal ends with an error even with --wait, so that the kubelet restarts the container and retries.
func TestRemoveFails(t *testing.T) {
	l := newLab(t).ready()
	l.stop()
	kerneltest.Must(t, os.Remove(l.dir+"/bin/podlace-sriov"), os.MkdirAll(l.dir+"/bin/podlace-sriov/in", 0o755))
	r := removal{binDir: l.dir + "/bin", confDir: l.dir + "/net.d", config: l.Config, http: "unix:" + l.dir + "/http", wait: true,
		out: &lines{}, poll: time.Second, log: slog.New(slog.DiscardHandler)}
	if err := r.run(t.Context()); err == nil || !strings.Contains(err.Error(), "podlace-sriov") {
		t.Error(err)
	}
}

// TestRemoveElsewhere: nothing is deleted if the folders in the flags are not the agent's, for example because the installation had the
// component k3s, but the manifest of the removal does not.
func TestRemoveElsewhere(t *testing.T) {
	l := newLab(t).ready()
	l.stop()
	exit, out, stderr := l.runCmd("remove", "--config", l.Config, "--bin-dir", t.TempDir())
	if exit == 0 || !strings.Contains(stderr, "same COMPONENTS") || l.node().PodCIDRs == nil || len(l.routes()) == 0 {
		t.Errorf("exit %d: %s%s", exit, out, stderr)
	}
}

// TestRemoveWaits: with --wait the remaining pods are printed once, and the readiness probe succeeds after the removal.
func TestRemoveWaits(t *testing.T) {
	l := newLab(t).ready()
	l.stop()
	l.writeRecord("a", "shop/web-1", l.lan.Path)
	ctx, cancel := context.WithCancel(t.Context())
	var out lines
	r := removal{binDir: l.dir + "/bin", confDir: l.dir + "/net.d", config: l.Config, http: "unix:" + l.dir + "/http", wait: true, out: &out,
		poll: 10 * time.Millisecond, log: slog.New(slog.DiscardHandler)}
	done := make(chan error)
	go func() { done <- r.run(ctx) }()
	l.await("the pod is named", func() bool { return out.count("shop/web-1") == 1 })
	l.await("the probe names it", func() bool {
		exit, _, stderr := l.runCmd("run", "--ready", "--http", r.http)
		return exit == 1 && strings.Contains(stderr, "shop/web-1")
	})
	kerneltest.Must(t, os.RemoveAll(store.Root+"/podlace")) // as its DEL would
	l.await("ready", func() bool { exit, _, _ := l.runCmd("run", "--ready", "--http", r.http); return exit == 0 })
	if out.count("shop/web-1") != 1 || len(l.routes()) > 0 || l.read("net.d/"+conflistName) != "" {
		t.Errorf("%s", &out)
	}
	cancel()
	kerneltest.Must(t, <-done)
}

// TestShadowed: another network's configuration sorts before the agent's conflist. The node is not ready, and the file is reported but
// unchanged.
func TestShadowed(t *testing.T) {
	l := newLab(t)
	for _, name := range []string{"05-other.conflist", ".hidden.conf", "05-old.conflist.bak", "10-podlace.conflist.d.txt"} {
		l.put("net.d/"+name, "{}")
	}
	l.start()
	l.await("the shadow is told", func() bool { return l.says("conflist", "shadowed by .hidden.conf 05-other.conflist", "takeOver") })
	if l.status().Ready || l.read("net.d/05-other.conflist") != "{}" {
		t.Errorf("%+v", l.status())
	}
	kerneltest.Must(t, os.Remove(l.dir+"/net.d/05-other.conflist"), os.Remove(l.dir+"/net.d/.hidden.conf"))
	l.await("ready", func() bool { return l.status().Ready })
}

// multusFiles are configurations of Multus that hand pods to the network of the agent's conflist: written by hand, or generated by its thin
// and its thick plugin.
func multusFiles() map[string]string {
	return map[string]string{
		"00-multus.conf": `{"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus", "delegates": [` + testConflist + `]}`,
		"00-multus.conflist": `{"cniVersion": "1.0.0", "name": "multus-cni-network", "plugins": [{"type": "multus", "delegates": [` +
			`{"cniVersion": "1.0.0", "name": "mine", "plugins": [{"type": "podlace-pod"}]}]}]}`,
		"01-multus.conf": `{"name": "multus-cni-network", "type": "multus-shim", "clusterNetwork": "/host/etc/cni/net.d/` + conflistName + `"}`,
		"02-multus.conf": `{"name": "multus-cni-network", "type": "multus", "clusterNetwork": "podlace"}`,
		"04-multus.conf": `{"name": "multus-cni-network", "type": "multus", "clusterNetwork": "10-podlace"}`,
		"03-multus.conf": `{"name": "multus-cni-network", "type": "multus-shim"}`,
	}
}

// TestMultus: Multus' configuration sorts before the agent's conflist. With Podlace as the default network of pods the node is ready; with
// another one the file is reported, and takeOver leaves it alone in either case.
func TestMultus(t *testing.T) {
	l := newLab(t, `"takeOver": true`)
	for name, text := range multusFiles() {
		l.put("net.d/"+name, text)
	}
	l.put("net.d/05-other.conflist", otherConflist)
	l.ready()
	for name, text := range multusFiles() {
		if l.read("net.d/"+name) != text {
			t.Errorf("%s was renamed", name)
		}
	}
	if l.read("net.d/05-other.conflist"+backup) == "" {
		t.Error("takeOver left the other conflist")
	}
	other := `{"name": "multus-cni-network", "type": "multus", "delegates": [` + otherConflist + `]}`
	l.put("net.d/00-multus.conf", other)
	l.await("the other network is told", func() bool {
		return !l.status().Ready && l.says("conflist", "shadowed by 00-multus.conf:", "clusterNetwork", conflistName)
	})
	if l.read("net.d/00-multus.conf") != other {
		t.Error("Multus' file was renamed")
	}
}

// TestNextConfig: a configuration of Multus that hands pods to Podlace is no other network.
func TestNextConfig(t *testing.T) {
	dir := t.TempDir()
	kerneltest.Must(t, os.WriteFile(filepath.Join(dir, conflistName), []byte(testConflist), 0o600))
	for name, text := range multusFiles() {
		kerneltest.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	if next, err := nextConfig(dir); err != nil || next != "" {
		t.Errorf("%q, %v", next, err)
	}
}

// TestPutBack: a configuration is not restored if its original name exists or its plugins are missing.
func TestPutBack(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.conf": "new", "a.conf" + backup: "old", "b.conf" + backup: "b",
		"c.conflist" + backup: otherConflist} {
		kerneltest.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	done, err := undoTakeOver(dir, t.TempDir())
	a, _ := os.ReadFile(dir + "/a.conf")
	b, _ := os.ReadFile(dir + "/b.conf")
	if err != nil || string(a) != "new" || string(b) != "b" || len(done) != 1 {
		t.Errorf("%v %q: %s, %s", err, done, a, b)
	}
}

// TestInstall: "podlace-node install" writes only the programs, and nothing the second time. Without a program in the source folder it
// fails.
func TestInstall(t *testing.T) {
	l := newLab(t)
	install := func(from string) (int, string, string) {
		return l.runCmd("install", "--plugins", from, "--bin-dir", l.dir+"/bin")
	}
	if exit, out, stderr := install(l.dir + "/plugins"); exit != 0 || strings.Count(out, "installed") != len(programs()) {
		t.Errorf("exit %d: %s%s", exit, out, stderr)
	}
	if exit, out, stderr := install(l.dir + "/plugins"); exit != 0 || out != "" {
		t.Errorf("again: exit %d: %s%s", exit, out, stderr)
	}
	l.put("bin/loopback", "of another network")
	l.put("plugins/bridge", strings.Repeat("bridgf", 100_000)) // same size
	if exit, out, stderr := install(l.dir + "/plugins"); exit != 0 ||
		strings.TrimSpace(out) != "installed "+l.dir+"/bin/podlace-bridge" || l.read("bin/loopback") != "of another network" {
		t.Errorf("another: exit %d: %s%s", exit, out, stderr)
	}
	if exit, _, stderr := install(t.TempDir()); exit == 0 || !strings.Contains(stderr, "none is in") {
		t.Errorf("empty: exit %d: %s", exit, stderr)
	}
}

// TestProcess: a second agent waits for the first to end. SIGTERM ends an agent at once and without changes, and "podlace-node run --ready"
// says whether it is ready.
func TestProcess(t *testing.T) {
	l := newLab(t)
	first := l.startProcess()
	l.await("ready", func() bool { return l.status().Ready })
	if exit, _, stderr := l.runCmd("run", "--ready", "--http", "unix:"+l.dir+"/http"); exit != 0 {
		t.Errorf("--ready: exit %d: %s", exit, stderr)
	}
	second := l.startProcess()
	l.await("the second waits", func() bool { return l.log.count("another podlace-node runs") == 1 })
	if exit, out, _ := l.runCmd("status"); exit != exitProblems || strings.Contains(out, "does not run") {
		t.Errorf("status: exit %d\n%s", exit, out)
	}
	kerneltest.Must(t, first.Process.Signal(syscall.SIGTERM), first.Wait())
	if !slices.Equal(l.routes(), full(2, 3)) || l.read("net.d/"+conflistName) == "" || l.node().PodCIDRs == nil {
		t.Error("the end of the agent changed the node")
	}
	l.api.put(l.peer(4))
	l.has(full(2, 3, 4)) // from the second agent
	began := time.Now()
	kerneltest.Must(t, second.Process.Signal(syscall.SIGTERM), second.Wait())
	t.Logf("ended within %v", time.Since(began))
	if exit, out, _ := l.runCmd("status"); exit != exitProblems || !strings.Contains(out, "podlace-node is not running") {
		t.Errorf("status: exit %d\n%s", exit, out)
	}
	if exit, _, stderr := l.runCmd("run", "--ready", "--http", "unix:"+l.dir+"/http"); exit != 1 || !strings.Contains(stderr, "not ready") {
		t.Errorf("--ready: exit %d: %s", exit, stderr)
	}
}

// TestWrongStart: invalid flags change nothing, and the error names the flag or value.
func TestWrongStart(t *testing.T) {
	l := newLab(t)
	for says, args := range map[string][]string{
		"NODE_NAME":            {"run", "--node-name", ""},
		"/nowhere/config.json": {"run", "--node-name", "n1", "--config", "/nowhere/config.json"},
		"/nowhere/kubeconfig":  {"run", "--node-name", "n1", "--config", l.Config, "--kubeconfig", "/nowhere/kubeconfig"},
		"unknown command":      {"rum"},
		"unknown flag":         {"run", "--node", "n1"},
		"table or json":        {"status", "-o", "yaml"},
		"has not run here":     {"status"},
	} {
		if exit, _, stderr := l.runCmd(args...); exit != 2 || !strings.Contains(stderr, says) {
			t.Errorf("%q: exit %d: %s", args, exit, stderr)
		}
	}
	if _, err := os.Stat(store.Root + "/" + statusName); !errors.Is(err, os.ErrNotExist) || len(l.routes()) > 0 {
		t.Error("something was done")
	}
}
