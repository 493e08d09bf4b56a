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

// grants are the VFs of running pods and their containers.
type grants map[string]struct {
	ids       []string
	container string
}

// grant runs a pod and records its VFs.
func (l *lab) grant(g grants, name string, limits resources) {
	l.t.Helper()
	ids := l.runPod(name, limits)
	g[name] = struct {
		ids       []string
		container string
	}{ids, l.status(name).Status.ContainerStatuses[0].ContainerID}
}

// kept fails the test unless all pods still have their VFs and their containers.
func (l *lab) kept(g grants) {
	l.t.Helper()
	for name, had := range g {
		within(l.t, 20*time.Second, "pod "+name+" still runs", func() error { return l.runs(name) })
		if ids := l.devices(name); !slices.Equal(ids, had.ids) {
			l.t.Errorf("pod %s has %v: want %v, as before", name, ids, had.ids)
		}
		if c := l.status(name).Status.ContainerStatuses[0]; c.ContainerID != had.container || c.RestartCount != 0 {
			l.t.Errorf("pod %s has a new container %s after %d restarts: want %s", name, c.ContainerID, c.RestartCount, had.container)
		}
	}
}

// all returns the VFs of all pods.
func (g grants) all() (ids []string) {
	for _, had := range g {
		ids = append(ids, had.ids...)
	}
	return ids
}

// TestKubeletRestarts: after each restart or kill, the kubelet soon knows the resource again. Pods keep their VFs, and a new pod gets
// all other VFs, so none is lost or allocated twice.
func TestKubeletRestarts(t *testing.T) {
	node.Skip(t)
	for _, registration := range []string{"classic", "registry"} {
		t.Run(registration, func(t *testing.T) {
			l := prepareLab(t, "best-effort", registration)
			l.kubelet.run()
			l.plugin.run()
			l.ready(20 * time.Second)
			g := grants{}
			l.grant(g, "one", vfs(1))
			l.grant(g, "two", guaranteed(1, 2))
			var longest time.Duration
			for n := range restarts {
				l.kubelet.end([]syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[n%2])
				l.kubelet.run()
				took := l.readyAgain()
				longest = max(longest, took)
				l.kept(g)
				if n%3 == 0 {
					rest := fmt.Sprint("rest-", n)
					l.distinct(append(l.runPod(rest, vfs(allVFs-3)), g.all()...))
					l.remove(rest)
				}
			}
			t.Logf("%d restarts, registered again within %d ms", restarts, longest.Milliseconds())
		})
	}
}

// readyAgain waits until the kubelet itself has the resource, and returns the time that this took.
func (l *lab) readyAgain() time.Duration {
	l.t.Helper()
	begin := time.Now()
	within(l.t, 10*time.Second, "the kubelet has the resource", func() error { return l.healthy(allVFs) })
	return time.Since(begin)
}

// TestPluginRestarts: pods keep running while the daemon is stopped, and the restarted daemon knows them. The kubelet allocates
// nothing meanwhile.
func TestPluginRestarts(t *testing.T) {
	l := newLab(t, "none")
	g := grants{}
	l.grant(g, "one", vfs(1))
	l.grant(g, "two", vfs(2))
	for n, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL, syscall.SIGTERM} {
		l.plugin.end(signal)
		away := fmt.Sprint("away-", n)
		within(t, 10*time.Second, "the kubelet has noticed", func() error { return l.free(0) })
		if reason, message := l.refused(away, vfs(1)); reason != "UnexpectedAdmissionError" && reason != "OutOfexample.com/fast" {
			t.Errorf("pod %s: %s: %s", away, reason, message)
		}
		l.plugin.run()
		l.ready(10 * time.Second)
		l.kept(g)
		l.named("two", g["two"].ids)
		rest := fmt.Sprint("rest-", n)
		l.distinct(append(l.runPod(rest, vfs(allVFs-3)), g.all()...))
		l.remove(rest)
	}
}
