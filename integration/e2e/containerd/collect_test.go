// SPDX-License-Identifier: Apache-2.0

package containerd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/e2e/containerd/cri"
)

// TestCollect: `podlace gc` keeps the state of a pod without its network namespace as long as containerd runs its sandbox, and then removes
// it. Other pods keep theirs, and containerd's later DEL succeeds.
func TestCollect(t *testing.T) {
	c := cri.Open(t, socket)
	const port = 18086
	web, lost := cri.RunPod(t, c, "web", cri.HostPort(port)), cri.RunPod(t, c, "lost", cri.HostPort(port+1), cri.Limits("20M", "20M"))
	if err := syscall.Unmount(lost.Netns, syscall.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(lost.Netns); err != nil {
		t.Fatal(err)
	}
	if out := collectDead(t); !strings.Contains(out, "0 of 2 attachments are dead, 2 stay") {
		t.Errorf("containerd runs both:\n%s", out)
	}
	killSandbox(t, lost.Sandbox)
	out := collectDead(t)
	if !regexp.MustCompile(`(?m)^podlace +[a-z]+/lost +`+lost.Sandbox[:13]+` .*removed: namespace .* is gone$`).MatchString(out) ||
		!strings.Contains(out, "1 removed, 0 left") {
		t.Errorf("containerd runs one:\n%s", out)
	}
	web.ServesOn(port)
	lost.Remove()
}

// collectDead runs `podlace gc` with the folders of containerd's configuration.
func collectDead(t *testing.T) string {
	t.Helper()
	config, err := os.ReadFile("/run/node/config.toml")
	if err != nil {
		t.Fatal(err)
	}
	folder := func(key string) string {
		m := regexp.MustCompile(key + ` = "([^"]*)"`).FindSubmatch(config)
		if m == nil {
			t.Fatalf("%s has no %s", config, key)
		}
		return string(m[1])
	}
	program := filepath.Join(folder("bin_dir"), "podlace")
	if _, err := os.Stat(program); err != nil {
		t.Skip("SKIPPED:", err)
	}
	out, err := exec.Command(program, "gc", "--yes", "--conf-dir", folder("conf_dir"), "--bin-dir", folder("bin_dir")).CombinedOutput()
	if err != nil {
		t.Errorf("podlace gc: %v", err)
	}
	return string(out)
}

// killSandbox kills the process of a sandbox, and waits until containerd reports the sandbox as not ready.
func killSandbox(t *testing.T, id string) {
	t.Helper()
	task := "/run/containerd/io.containerd.runtime.v2.task/k8s.io/" + id
	data, err := os.ReadFile(task + "/init.pid")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid < 2 {
		t.Fatal(pid, err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(task); err != nil {
			return
		}
	}
	t.Fatalf("containerd keeps %s", task)
}
