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

	"github.com/podlace/podlace/pkg/poddevices"
)

const podSocket = kubeletRoot + "/pod-resources/kubelet.sock"

// hideSocket moves the kubelet's socket away until the returned function is called.
func hideSocket(t *testing.T) (show func()) {
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

// countRefusals returns the number of ADDs to which neither the daemon nor the kubelet reported the pod's VFs.
func (l *vfLab) countRefusals() int {
	data, _ := os.ReadFile(l.testKubelet.log)
	return strings.Count(string(data), `plugin type=\"sriov\" failed (add): sriov add: find the VFs of the pod:`)
}

// TestDaemonAnswers: pods with and without VFs start although sriov can ask only the daemon, because the configured folder of the kubelet
// does not exist.
func TestDaemonAnswers(t *testing.T) {
	l := newVFLab(t, `"kubeletDir": "/nonexistent"`)
	l.putPod("web", containerSpec{name: "app", limits: podResources{resource: "2", slow: "1"}})
	l.checkVFs("web", l.awaitRunning("web", ""), append(l.allocatedVFs("web", "app", slow), l.allocatedVFs("web", "app", resource)...)...)
	l.putPod("plain", containerSpec{name: "app"})
	l.checkVFs("plain", l.awaitRunning("plain", ""))
	l.removePods("web", "plain")
	l.checkReturned()
}

// TestWhoAnswers: the daemon reports a pod's VFs to the sriov plugin, and while it is stopped the kubelet reports the same. If neither
// answers, the pod waits until one does. Without the daemon, the kubelet starts no container that requests its devices. The sandbox of such
// a pod can still be replaced and gets its VFs, but no container starts in it.
func TestWhoAnswers(t *testing.T) {
	l := newVFLab(t)
	l.putPod("web", containerSpec{name: "app", limits: podResources{resource: "2", slow: "1"}})
	uid := l.awaitRunning("web", "")
	ids := append(l.allocatedVFs("web", "app", slow), l.allocatedVFs("web", "app", resource)...)
	l.putPod("plain", containerSpec{name: "app"})
	plain := l.awaitRunning("plain", "")

	l.devicePlugin.endProgram(syscall.SIGKILL)
	if _, err := os.Stat(poddevices.Socket); err != nil {
		t.Error(err) // the socket must remain and refuse connections, as after a crash
	}
	web := l.endSandbox("web")
	l.awaitRestarted("plain", l.endSandbox("plain"))
	l.awaitNewSandbox("web", web)
	l.checkAttached("web", ids...)
	l.checkVFs("plain", plain)

	show := hideSocket(t)
	former := l.countRefusals()
	web = l.endSandbox("web")
	checkWithin(t, 40*time.Second, "an ADD is refused", func() error {
		if l.countRefusals() == former {
			return fmt.Errorf("%d refusals", former)
		}
		return nil
	})
	if s, ok := sandboxOf("web"); ok && s.id != web.id {
		t.Errorf("neither daemon nor kubelet reports the pod's VFs, but the sandbox is %+v", s)
	}
	show()
	l.runDaemon()
	l.awaitRestarted("web", web)
	l.checkVFs("web", uid, ids...)
	l.removePods("web", "plain")
	l.checkReturned()
}

// sendRequests keeps asking the kubelet for the list of all pods, at a given rate, until stop is called, which returns the number of
// rejected requests.
func sendRequests(t *testing.T, rate int) (stop func() (limited int)) {
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

// TestRateLimit (V-24): each pod gets its VFs although other programs exceed the kubelet's rate limit. A failed ADD succeeds when the
// kubelet retries it.
func TestRateLimit(t *testing.T) {
	l := newVFLab(t)
	uids, ids := map[string]string{}, map[string][]string{}
	for n := range 4 {
		name := fmt.Sprint("web", n)
		l.putPod(name, containerSpec{name: "app", limits: vfs(n % 3)})
		uids[name] = l.awaitRunning(name, "")
		ids[name] = l.allocatedVFs(name, "app", resource)
	}
	for _, who := range []string{"daemon", "kubelet"} {
		rate := 600
		if who == "kubelet" {
			// The kubelet permits 100 requests a second. With 600 of another program, all ADDs of one minute may fail.
			l.devicePlugin.endProgram(syscall.SIGTERM)
			rate = 200
		}
		refused, stop, former := l.countRefusals(), sendRequests(t, rate), map[string]podSandbox{}
		for name := range uids {
			former[name] = l.endSandbox(name)
		}
		for name := range uids {
			l.awaitNewSandbox(name, former[name])
			l.checkAttached(name, ids[name]...)
		}
		for name := range uids {
			if who == "daemon" { // a container with devices of the daemon starts only while the daemon runs
				l.awaitRestarted(name, former[name])
			}
		}
		limited := stop()
		t.Logf("by the %s: the kubelet refused %d requests of another program, and %d ADDs failed", who, limited, l.countRefusals()-refused)
		if limited == 0 {
			t.Error("the kubelet was never asked too much")
		}
	}
	l.runDaemon()
	for name, uid := range uids {
		checkWithin(t, 60*time.Second, "pod "+name+" runs", func() error { return l.runs(name) })
		l.checkVFs(name, uid, ids[name]...)
	}
	l.removePods(slices.Sorted(maps.Keys(uids))...)
	l.checkReturned()
}

// TestRestartDuringAdd (V-25): the kubelet is killed while an ADD waits for an answer from it or from the daemon.
func TestRestartDuringAdd(t *testing.T) {
	l := newVFLab(t)
	for _, who := range []string{"daemon", "kubelet"} {
		l.putPod("web", containerSpec{name: "app", limits: vfs(2)})
		uid := l.awaitRunning("web", "")
		ids := l.allocatedVFs("web", "app", resource)
		stop := func() int { return 0 }
		if who == "daemon" {
			l.signal(syscall.SIGSTOP)
		} else {
			l.devicePlugin.endProgram(syscall.SIGTERM)
			stop = sendRequests(t, 5000)
		}
		former := l.endSandbox("web")
		checkWithin(t, time.Minute, "an ADD runs", func() error {
			if n := runningAdds(); n != 1 {
				return fmt.Errorf("%d run", n)
			}
			return nil
		})
		l.testKubelet.endProgram(syscall.SIGKILL)
		stop()
		if who == "daemon" {
			l.signal(syscall.SIGCONT)
		} else {
			l.runDaemon()
		}
		l.runKubelet()
		if l.refusedAtStart("web") {
			l.removePods("web")
			l.checkReturned()
			l.awaitReady(20 * time.Second)
			l.putPod("web", containerSpec{name: "app", limits: vfs(2)})
			uid = l.awaitRunning("web", uid)
			ids = l.allocatedVFs("web", "app", resource)
		} else {
			l.awaitRestarted("web", former)
		}
		l.checkVFs("web", uid, ids...)
		l.removePods("web")
		l.checkReturned()
	}
}

func (l *vfLab) signal(s syscall.Signal) {
	l.t.Helper()
	if err := l.devicePlugin.cmd.Process.Signal(s); err != nil {
		l.t.Fatal(err)
	}
}

// refusedAtStart reports whether the restarted kubelet refuses a running pod because the device plugin has not registered yet.
func (l *vfLab) refusedAtStart(pod string) (refused bool) {
	l.t.Helper()
	checkWithin(l.t, 60*time.Second, "pod "+pod+" starts or is refused", func() error {
		pods, err := l.podsByName()
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

// TestSameName: a new pod with the name of one that has ended or not started gets its own VFs.
func TestSameName(t *testing.T) {
	l := newVFLab(t)
	uid := ""
	for n, count := range []int{1, 0, 2} {
		l.putPod("web", containerSpec{name: "app", limits: vfs(count)}) // replaces the previous pod
		uid = l.awaitRunning("web", uid)
		ids := l.allocatedVFs("web", "app", resource)
		if len(ids) != count {
			t.Fatalf("pod %d was allocated %v: want %d", n, ids, count)
		}
		l.checkVFs("web", uid, ids...)
		if left := journaledVFs(t); len(left) != count {
			t.Errorf("pod %d: journals of %v: want %v", n, left, ids)
		}
	}
	for _, count := range []int{0, 2, 1} {
		l.putPod("web", containerSpec{name: "app", limits: vfs(count)})
		checkWithin(t, 10*time.Second, "the kubelet knows the pod", func() error {
			if ids := l.allocatedVFs("web", "app", resource); len(ids) != count {
				return fmt.Errorf("it has %v", ids)
			}
			return nil
		})
	}
	uid = l.awaitRunning("web", uid)
	l.checkVFs("web", uid, l.allocatedVFs("web", "app", resource)...)
	l.removePods("web")
	l.checkReturned()
}
