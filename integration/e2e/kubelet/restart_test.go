// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
)

const restarts = 20

// podGrants contains the VFs and the container of each running pod.
type podGrants map[string]struct {
	ids       []string
	container string
}

// grantVFs runs a pod and records its VFs.
func (l *testLab) grantVFs(g podGrants, name string, limits podResources) {
	l.t.Helper()
	ids := l.runPod(name, limits)
	g[name] = struct {
		ids       []string
		container string
	}{ids, l.statusOf(name).Status.ContainerStatuses[0].ContainerID}
}

// checkKept fails the test unless all pods still have their VFs and their containers.
func (l *testLab) checkKept(g podGrants) {
	l.t.Helper()
	for name, had := range g {
		checkWithin(l.t, 20*time.Second, "pod "+name+" still runs", func() error { return l.runs(name) })
		if ids := l.devicesOf(name); !slices.Equal(ids, had.ids) {
			l.t.Errorf("pod %s has %v: want %v, as before", name, ids, had.ids)
		}
		if c := l.statusOf(name).Status.ContainerStatuses[0]; c.ContainerID != had.container || c.RestartCount != 0 {
			l.t.Errorf("pod %s has a new container %s after %d restarts: want %s", name, c.ContainerID, c.RestartCount, had.container)
		}
	}
}

// allGranted returns the VFs of all pods.
func (g podGrants) allGranted() (ids []string) {
	for _, had := range g {
		ids = append(ids, had.ids...)
	}
	return ids
}

// TestKubeletRestarts: after each restart or kill of the kubelet, the device plugin registers again within seconds, and running pods keep
// their VFs. A new pod gets all free VFs and none of another pod, so none is lost or allocated twice.
func TestKubeletRestarts(t *testing.T) {
	node.Skip(t)
	for _, registration := range []string{"classic", "registry"} {
		t.Run(registration, func(t *testing.T) {
			l := prepareLab(t, "best-effort", registration)
			l.runKubelet()
			l.runDaemon()
			l.awaitReady(20 * time.Second)
			g := podGrants{}
			l.grantVFs(g, "one", vfs(1))
			l.grantVFs(g, "two", guaranteedLimits(1, 2))
			var longest time.Duration
			for n := range restarts {
				l.testKubelet.endProgram([]syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[n%2])
				l.runKubelet()
				took := l.awaitHealthy()
				longest = max(longest, took)
				l.checkKept(g)
				if n%3 == 0 {
					rest := fmt.Sprint("rest-", n)
					l.checkDistinct(append(l.runPod(rest, vfs(allVFs-3)), g.allGranted()...))
					l.removePods(rest)
				}
			}
			t.Logf("%d restarts, registered again within %d ms", restarts, longest.Milliseconds())
		})
	}
}

// awaitHealthy waits until the kubelet has all VFs, and returns the waiting time.
func (l *testLab) awaitHealthy() time.Duration {
	l.t.Helper()
	begin := time.Now()
	checkWithin(l.t, 10*time.Second, "the kubelet has the resource", func() error { return l.checkHealthy(allVFs) })
	return time.Since(begin)
}

// TestPluginRestarts: while the daemon is stopped, pods keep running and the kubelet allocates no VF. The restarted daemon reports the
// pods' VFs.
func TestPluginRestarts(t *testing.T) {
	l := newLab(t, "none")
	g := podGrants{}
	l.grantVFs(g, "one", vfs(1))
	l.grantVFs(g, "two", vfs(2))
	for n, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL, syscall.SIGTERM} {
		l.devicePlugin.endProgram(signal)
		away := fmt.Sprint("away-", n)
		checkWithin(t, 10*time.Second, "the kubelet has noticed", func() error { return l.checkFree(0) })
		if reason, message := l.runRefused(away, vfs(1)); reason != "UnexpectedAdmissionError" && reason != "OutOfexample.com/fast" {
			t.Errorf("pod %s: %s: %s", away, reason, message)
		}
		l.runDaemon()
		l.awaitReady(10 * time.Second)
		l.checkKept(g)
		l.checkReported("two", g["two"].ids)
		rest := fmt.Sprint("rest-", n)
		l.checkDistinct(append(l.runPod(rest, vfs(allVFs-3)), g.allGranted()...))
		l.removePods(rest)
	}
}
