// SPDX-License-Identifier: Apache-2.0

package crio_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/e2e/containerd/cri"
	"github.com/podlace/podlace/integration/kerneltest"
)

// TestDeathWhileAway: a pod's processes and namespaces end while CRI-O is stopped. When it starts, it calls DEL, which leaves no state of
// this pod and keeps the state of the other pods.
func TestDeathWhileAway(t *testing.T) {
	c := cri.Open(t, socket)
	web, dead := cri.RunPod(t, c, "web"), cri.RunPod(t, c, "dead", cri.Limits("20M", "20M"))
	restartCRIO(t, c, syscall.SIGKILL, func() {
		killPod(t, dead)
		removeNamespaces(t, dead)
	})
	awaitNoRecords(t, "shop/dead")
	if len(podRecords(t, "shop/web")) == 0 {
		t.Error("pod web has no record")
	}
	web.Serves("", web.At(web.V4))
}

// TestLostStore: CRI-O is killed, and starts without its stored pods, as if /var/lib/containers had been removed. Its GC removes all their
// state, although their network namespaces still exist.
func TestLostStore(t *testing.T) {
	c := cri.Open(t, socket)
	const store, saved = "/var/lib/containers/storage", "/run/node/store"
	restartCRIO(t, c, syscall.SIGTERM, func() { shell(t, "rm -rf "+saved+" && cp -a "+store+" "+saved) })
	pods := []*cri.Pod{cri.RunPod(t, c, "one", cri.Limits("20M", "20M")), cri.RunPod(t, c, "two")}
	restartCRIO(t, c, syscall.SIGKILL, func() {
		for _, p := range pods {
			killPod(t, p)
		}
		shell(t, "awk '$2 ~ /^.var.lib.containers.storage|^.run.containers/ {print $2}' /proc/self/mounts | sort -r | xargs -r umount -l")
		if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil { // GC keeps recent attachments
			t.Fatal(err)
		}
		shell(t, "rm -rf /run/containers/* "+store+" /var/lib/cni/results/* && mv "+saved+" "+store)
	})
	for _, p := range pods {
		if _, err := c.Network(t.Context(), p.Sandbox); err == nil {
			t.Errorf("CRI-O knows pod %s: this test shows nothing", p.Name)
		}
		awaitNoRecords(t, "shop/"+p.Name)
		removeNamespaces(t, p)
		p.Sandbox = "" // no pod to stop
	}
}

// killPod kills all processes in the pod's network namespace.
func killPod(t *testing.T, p *cri.Pod) {
	t.Helper()
	var want syscall.Stat_t
	if err := syscall.Stat(p.Netns, &want); err != nil {
		t.Fatal(err)
	}
	killed := 0
	spaces, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, space := range spaces {
		var pid int
		var got syscall.Stat_t
		if syscall.Stat(space, &got) != nil || got.Ino != want.Ino {
			continue
		}
		if _, err := fmt.Sscanf(space, "/proc/%d/", &pid); err != nil || syscall.Kill(pid, syscall.SIGKILL) != nil {
			t.Errorf("%s: %v", space, err)
		}
		killed++
	}
	if killed == 0 {
		t.Fatalf("pod %s has no process", p.Name)
	}
}

// removeNamespaces removes the pod's namespaces.
func removeNamespaces(t *testing.T, p *cri.Pod) {
	t.Helper()
	for _, kind := range []string{"netns", "ipcns", "utsns"} {
		path := filepath.Join("/run", kind, filepath.Base(p.Netns))
		if err := errors.Join(syscall.Unmount(path, syscall.MNT_DETACH), os.Remove(path)); err != nil {
			t.Fatal(err)
		}
	}
}

// podRecords returns the files below /run/podlace that contain the pod's name.
func podRecords(t *testing.T, pod string) []string {
	t.Helper()
	var named []string
	paths, err := filepath.Glob("/run/podlace/*/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), `"`+pod+`"`) {
			named = append(named, path)
		}
	}
	return named
}

// awaitNoRecords waits until the pod has no records. If records remain after the time limit, the test fails.
func awaitNoRecords(t *testing.T, pod string) {
	t.Helper()
	checkWithin(t, 20*time.Second, "nothing is left of "+pod, func() error {
		if left := podRecords(t, pod); len(left) > 0 {
			return fmt.Errorf("left: %v", left)
		}
		return nil
	})
}

func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}
