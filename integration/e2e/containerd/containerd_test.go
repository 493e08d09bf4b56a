// SPDX-License-Identifier: Apache-2.0

package containerd_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/e2e/containerd/cri"
)

const socket = "/run/containerd/containerd.sock"

// TestPods runs the common tests of all runtimes with containerd.
func TestPods(t *testing.T) { cri.Suite(t, socket, cri.HostPorts{Localhost: true, Itself: true}) }

// TestRestart: containerd restarts while a pod runs, and can stop it with only the state on disk.
func TestRestart(t *testing.T) {
	c := cri.Open(t, socket)
	const port = 18085
	p := cri.RunPod(t, c, "restart", cri.HostPort(port), cri.Limits("100M", "100M"))
	restartContainerd(t, c)
	p.ServesOn(port)
	p.Remove()
}

func restartContainerd(t *testing.T, c cri.Client) {
	t.Helper()
	before := containerdPID(t)
	if err := syscall.Kill(before, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	err := cri.Eventually(t.Context(), 20*time.Second, func() error {
		if containerdPID(t) == before {
			return fmt.Errorf("containerd %d still runs", before)
		}
		return c.Ready(t.Context())
	})
	if err != nil {
		t.Fatalf("restart of containerd: %v", err)
	}
}

func containerdPID(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/run/node/containerd.pid")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// TestFailedRun: a failed ADD leaves no state of the pod. Its error, which the kubelet would write into the events, has the pod's name.
func TestFailedRun(t *testing.T) {
	c := cri.Open(t, socket)
	_, err := c.Run(t.Context(), cri.PodConfig("wrong", cri.HostPort(70000), cri.Limits("100M", "100M")))
	if err == nil {
		t.Fatal("a pod with hostPort 70000 runs")
	}
	if !strings.Contains(err.Error(), "shop/wrong") || !strings.Contains(err.Error(), "70000") {
		t.Errorf("want an error with the pod shop/wrong and the port 70000: %v", err)
	}
	if err := c.RemoveAll(t.Context()); err != nil {
		t.Error(err)
	}
}
