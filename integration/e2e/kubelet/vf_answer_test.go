// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/allocation"
)

const podSocket = kubeletRoot + "/pod-resources/kubelet.sock"

// hide moves the kubelet's socket away until the returned function is called.
func hide(t *testing.T) (show func()) {
	t.Helper()
	aside := podSocket + ".aside"
	if err := os.Rename(podSocket, aside); err != nil {
		t.Fatal(err)
	}
	return sync.OnceFunc(func() {
		if err := os.Rename(aside, podSocket); err != nil {
			t.Error(err)
		}
	})
}

// refusals counts the ADDs that failed because neither the daemon nor the kubelet reported the pod's VFs.
func (l *vfLab) refusals() int {
	data, _ := os.ReadFile(l.kubelet.log)
	return strings.Count(string(data), `plugin type=\"sriov\" failed (add): sriov add: find the VFs of the pod:`)
}

// TestDaemonAnswers: pods with and without VFs start if only the daemon can answer which VFs a pod has.
func TestDaemonAnswers(t *testing.T) {
	l := newVFLab(t, `"kubeletDir": "/nonexistent"`)
	l.put("web", container{name: "app", limits: resources{resource: "2", slow: "1"}})
	l.has("web", l.up("web", ""), append(l.allocated("web", "app", slow), l.allocated("web", "app", resource)...)...)
	l.put("plain", container{name: "app"})
	l.has("plain", l.up("plain", ""))
	l.remove("web", "plain")
	l.allHome()
}

// TestWhoAnswers: pods get the same VFs from the daemon and, if the daemon is stopped, from the kubelet. If neither can answer, the
// pod does not start until one is back. Without the daemon the kubelet starts no container with its devices, but the sandbox still has
// them.
func TestWhoAnswers(t *testing.T) {
	l := newVFLab(t)
	l.put("web", container{name: "app", limits: resources{resource: "2", slow: "1"}})
	uid := l.up("web", "")
	ids := append(l.allocated("web", "app", slow), l.allocated("web", "app", resource)...)
	l.put("plain", container{name: "app"})
	plain := l.up("plain", "")

	l.plugin.end(syscall.SIGKILL)
	if _, err := os.Stat(allocation.Socket); err != nil {
		t.Error(err) // it refuses connections, as after a crash
	}
	web := l.endSandbox("web")
	l.again("plain", l.endSandbox("plain"))
	l.awaitNewSandbox("web", web)
	l.attached("web", ids...)
	l.has("plain", plain)

	show := hide(t)
	former := l.refusals()
	web = l.endSandbox("web")
	within(t, 40*time.Second, "an ADD is refused", func() error {
		if l.refusals() == former {
			return fmt.Errorf("%d refusals", former)
		}
		return nil
	})
	if s, ok := sandboxOf("web"); ok && s.id != web.id {
		t.Errorf("neither daemon nor kubelet reports the pod's VFs, but the sandbox is %+v", s)
	}
	show()
	l.plugin.run()
	l.again("web", web)
	l.has("web", uid, ids...)
	l.remove("web", "plain")
	l.allHome()
}

// hammer asks the kubelet for all pods at a given rate until stop is called. stop returns the number of rejected requests.
func hammer(t *testing.T, rate int) (stop func() (limited int)) {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+podSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	client := api.NewPodResourcesListerClient(conn)
	done, ended, limited := make(chan struct{}), make(chan struct{}), 0
	go func() {
		defer close(ended)
		for tick := time.NewTicker(time.Second / time.Duration(rate)); ; {
			select {
			case <-done:
				tick.Stop()
				return
			case <-tick.C:
			}
			if _, err := client.List(t.Context(), &api.ListPodResourcesRequest{}); status.Code(err) == codes.ResourceExhausted {
				limited++
			}
		}
	}()
	return sync.OnceValue(func() int { close(done); <-ended; conn.Close(); return limited })
}

// TestRateLimit (V-24): while other programs exceed the kubelet's rate limit, pods get their allocated VFs, or ADD fails and succeeds
// later.
func TestRateLimit(t *testing.T) {
	l := newVFLab(t)
	uids, ids := map[string]string{}, map[string][]string{}
	for n := range 4 {
		name := fmt.Sprint("web", n)
		l.put(name, container{name: "app", limits: vfs(n % 3)})
		uids[name] = l.up(name, "")
		ids[name] = l.allocated(name, "app", resource)
	}
	for _, who := range []string{"daemon", "kubelet"} {
		rate := 600
		if who == "kubelet" {
			// The kubelet's rate limit is 100 requests a second. With 600 requests a second from another program, all ADDs of one
			// minute may fail.
			l.plugin.end(syscall.SIGTERM)
			rate = 200
		}
		refused, stop, former := l.refusals(), hammer(t, rate), map[string]sandbox{}
		for name := range uids {
			former[name] = l.endSandbox(name)
		}
		for name := range uids {
			l.awaitNewSandbox(name, former[name])
			l.attached(name, ids[name]...)
		}
		for name := range uids {
			if who == "daemon" { // a container with the daemon's devices needs the daemon
				l.again(name, former[name])
			}
		}
		limited := stop()
		t.Logf("by the %s: the kubelet refused %d requests of another program, and %d ADDs failed", who, limited, l.refusals()-refused)
		if limited == 0 {
			t.Error("the kubelet was never asked too much")
		}
	}
	l.plugin.run()
	for name, uid := range uids {
		within(t, 60*time.Second, "pod "+name+" runs", func() error { return l.runs(name) })
		l.has(name, uid, ids[name]...)
	}
	l.remove(slices.Sorted(maps.Keys(uids))...)
	l.allHome()
}

// TestRestartDuringAdd (V-25): the kubelet is killed while an ADD waits for the answer of the daemon or of the kubelet.
func TestRestartDuringAdd(t *testing.T) {
	l := newVFLab(t)
	for _, who := range []string{"daemon", "kubelet"} {
		l.put("web", container{name: "app", limits: vfs(2)})
		uid := l.up("web", "")
		ids := l.allocated("web", "app", resource)
		stop := func() int { return 0 }
		if who == "daemon" {
			l.signal(syscall.SIGSTOP)
		} else {
			l.plugin.end(syscall.SIGTERM)
			stop = hammer(t, 5000)
		}
		former := l.endSandbox("web")
		within(t, 20*time.Second, "an ADD runs", func() error {
			if n := adding(); n != 1 {
				return fmt.Errorf("%d run", n)
			}
			return nil
		})
		l.kubelet.end(syscall.SIGKILL)
		stop()
		if who == "daemon" {
			l.signal(syscall.SIGCONT)
		} else {
			l.plugin.run()
		}
		l.kubelet.run()
		if l.refusedAtStart("web") {
			l.remove("web")
			l.allHome()
			l.ready(20 * time.Second)
			l.put("web", container{name: "app", limits: vfs(2)})
			uid = l.up("web", uid)
			ids = l.allocated("web", "app", resource)
		} else {
			l.again("web", former)
		}
		l.has("web", uid, ids...)
		l.remove("web")
		l.allHome()
	}
}

func (l *vfLab) signal(s syscall.Signal) {
	l.t.Helper()
	if err := l.plugin.cmd.Process.Signal(s); err != nil {
		l.t.Fatal(err)
	}
}

// refusedAtStart reports whether the restarted kubelet refuses an earlier pod because the device plugin is not yet registered.
func (l *vfLab) refusedAtStart(pod string) (refused bool) {
	l.t.Helper()
	within(l.t, 60*time.Second, "pod "+pod+" starts or is refused", func() error {
		pods, err := l.pods()
		p := pods[pod]
		refused = p.Status.Phase == "Failed" && p.Status.Reason == "UnexpectedAdmissionError"
		if err == nil && !refused && l.runs(pod) != nil {
			err = fmt.Errorf("%q %s: %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		return err
	})
	l.t.Logf("refused at the start of the kubelet: %v", refused)
	return refused
}

// TestSameName: a pod that follows another pod of the same name, or replaces it before its start, gets its own allocated VFs.
func TestSameName(t *testing.T) {
	l := newVFLab(t)
	uid := ""
	for n, count := range []int{1, 0, 2} {
		l.put("web", container{name: "app", limits: vfs(count)}) // replaces the previous pod
		uid = l.up("web", uid)
		ids := l.allocated("web", "app", resource)
		if len(ids) != count {
			t.Fatalf("pod %d was allocated %v: want %d", n, ids, count)
		}
		l.has("web", uid, ids...)
		if left := journals(t); len(left) != count {
			t.Errorf("pod %d: journals of %v: want %v", n, left, ids)
		}
	}
	for _, count := range []int{0, 2, 1} {
		l.put("web", container{name: "app", limits: vfs(count)})
		within(t, 10*time.Second, "the kubelet knows the pod", func() error {
			if ids := l.allocated("web", "app", resource); len(ids) != count {
				return fmt.Errorf("it has %v", ids)
			}
			return nil
		})
	}
	uid = l.up("web", uid)
	l.has("web", uid, l.allocated("web", "app", resource)...)
	l.remove("web")
	l.allHome()
}
