// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/store"
)

// newInstance returns another instance of the driver on the test environment's node.
func (l *draLab) newInstance(uid string) *draLab {
	o := l.options
	o.Instance = uid
	other := *l
	other.Driver = New(o)
	other.repeatInventory()
	return &other
}

// TestUpgrade has two instances serve the kubelet with the same claim records. When the leader ends, the other takes over.
func TestUpgrade(t *testing.T) {
	l := newDRALab(t)
	a, b := l.newInstance("uid-a"), l.newInstance("uid-b")
	stopA := a.runDriver()
	l.await("the first one leads", a.Leads)
	registry, data := l.options.socketFolders()
	stopB := b.runDriver()
	kb := b.registerAt(filepath.Join(registry, "sriov.podlace.io-uid-b-reg.sock"), false)
	ka := a.registerAt(filepath.Join(registry, "sriov.podlace.io-uid-a-reg.sock"), false)
	if kb.endpoint != filepath.Join(data, "dra-uid-b.sock") || b.Leads() || b.Ready() != "" {
		t.Errorf("endpoint %s, leads: %t, %s", kb.endpoint, b.Leads(), b.Ready())
	}
	old, young := newClaim("c-1", "old", deviceResult("a", vf0)), newClaim("c-2", "young", deviceResult("a", vf0))
	l.addClaims(old, young)
	ka.prepareClaims(old)
	if got := kb.prepareClaims(young); !strings.Contains(got[0], "VF 0000:11:02.0 still belongs to claim shop/old") {
		t.Error(got)
	}
	if got := kb.unprepareClaims("c-1"); got[0] != "" {
		t.Error(got)
	}
	if got := kb.prepareClaims(young); !strings.HasPrefix(got[0], "a=") {
		t.Error(got)
	}
	stopA()
	l.await("the second one leads", b.Leads)
	if got := l.fileNames(registry) + " " + l.fileNames(data); got != "sriov.podlace.io-uid-b-reg.sock dra-device-metadata dra-uid-b.sock" {
		t.Errorf("sockets: %s", got)
	}
	if got := kb.unprepareClaims("c-2"); got[0] != "" {
		t.Error(got)
	}
	stopB()
}

// TestStaleSockets checks that the sockets of a killed instance are deleted, and that the sockets of a running instance stay.
func TestStaleSockets(t *testing.T) {
	l := newDRALab(t)
	registry, data := l.options.socketFolders()
	must(t, os.MkdirAll(registry, 0o755), os.MkdirAll(data, 0o755))
	var open []net.Listener
	for _, path := range []string{filepath.Join(registry, "sriov.podlace.io-dead-reg.sock"), filepath.Join(data, "dra-dead.sock"),
		filepath.Join(registry, "sriov.podlace.io-live-reg.sock")} {
		s, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		must(t, err)
		s.SetUnlinkOnClose(false)
		if strings.Contains(path, "dead") {
			s.Close()
		} else {
			open = append(open, s)
		}
	}
	l.newInstance("uid-b").runDriver()
	l.await("only the sockets of instances that run", func() bool {
		return l.fileNames(registry)+" "+l.fileNames(data) == "sriov.podlace.io-live-reg.sock sriov.podlace.io-uid-b-reg.sock dra-uid-b.sock"
	})
	for _, s := range open {
		s.Close()
	}
}

// TestTwoServices runs two daemons as services, without the UID of a pod. The second serves the kubelet only after the first has ended,
// and logs its name.
func TestTwoServices(t *testing.T) {
	l := newDRALab(t)
	a, b := l.newInstance(""), l.newInstance("")
	stop := a.runDriver()
	k := a.register(false)
	b.runDriver()
	l.await("the second one says who leads", func() bool { return strings.Contains(l.log.String(), "the service with process") })
	l.await("the second one is not ready", func() bool { return strings.Contains(b.Ready(), "the service with process") })
	c := newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(c)
	if got := k.prepareClaims(c); !strings.HasPrefix(got[0], "a=") {
		t.Error(got)
	}
	stop()
	l.await("the second one leads", b.Leads)
	if got := b.register(false).unprepareClaims("c-1"); got[0] != "" {
		t.Error(got)
	}
}

// TestServiceAndPod runs one daemon as a service and one in a pod. The first to start serves the kubelet. The second opens no sockets,
// logs the name of the first and what the admin can do, and takes over when the first ends.
func TestServiceAndPod(t *testing.T) {
	for _, c := range []struct{ first, second, name string }{
		{"", "uid-b", "the service with process"},
		{"uid-a", "", "the pod with UID uid-a"},
	} {
		l := newDRALab(t)
		a, b := l.newInstance(c.first), l.newInstance(c.second)
		stop := a.runDriver()
		l.await("the first one is ready to be registered", func() bool { return a.Ready() == "the kubelet has not registered driver sriov.podlace.io" })
		b.runDriver()
		l.await("the second one says who serves", func() bool {
			return strings.HasPrefix(b.Ready(), c.name) && strings.Contains(b.Ready(), "not both")
		})
		time.Sleep(2 * leadInterval)
		registry, _ := l.options.socketFolders()
		if sockets := l.fileNames(registry); strings.Contains(sockets, " ") || b.Leads() || a.Ready() != "the kubelet has not registered driver sriov.podlace.io" {
			t.Errorf("sockets %s, the second one leads: %t, the first one: %s", sockets, b.Leads(), a.Ready())
		}
		stop()
		l.await("the second one serves", func() bool {
			return b.Leads() && b.Ready() == "the kubelet has not registered driver sriov.podlace.io"
		})
	}
}

// TestCannotLead has an error in place of the leader lock, which must be reported. A service then does not serve the kubelet, because
// another instance may already do so, but an instance in a pod does.
func TestCannotLead(t *testing.T) {
	l := newDRALab(t)
	must(t, os.MkdirAll(filepath.Join(filepath.Dir(l.options.Claims), leaderLock), 0o755))
	service, pod := l.newInstance(""), l.newInstance("uid-a")
	service.runDriver()
	pod.runDriver()
	l.await("the service says why", func() bool { return strings.Contains(service.Ready(), "is a directory") })
	if strings.Contains(service.Ready(), "serves the claims") || strings.Contains(l.log.String(), "another instance leads") {
		t.Errorf("%s\n%s", service.Ready(), l.log)
	}
	l.await("the pod serves", func() bool { return pod.Ready() == "the kubelet has not registered driver sriov.podlace.io" })
}

// TestServiceTakesLead checks that an instance in a pod stops serving the kubelet when a service becomes the leader.
func TestServiceTakesLead(t *testing.T) {
	l := newDRALab(t)
	pod := l.newInstance("uid-a")
	pod.runDriver()
	l.await("the pod leads", pod.Leads)
	registry, data := l.options.socketFolders()
	l.await("the pod serves", func() bool {
		return l.fileNames(registry)+l.fileNames(data) == "sriov.podlace.io-uid-a-reg.sockdra-uid-a.sock"
	})
	unlock := l.takeLead()
	l.await("the pod has stopped", func() bool {
		return l.fileNames(registry)+l.fileNames(data) == "" && strings.HasPrefix(pod.Ready(), "the service with process 7")
	})
	unlock()
	l.await("the pod serves again", func() bool { return pod.Leads() && l.fileNames(registry) == "sriov.podlace.io-uid-a-reg.sock" })
}

// TestSocketsRemoved checks that the driver restores its sockets after another program deletes the sockets or their folder.
func TestSocketsRemoved(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	l.register(false)
	registry, data := l.options.socketFolders()
	for _, remove := range []string{filepath.Join(registry, "sriov.podlace.io-reg.sock"), data} {
		must(t, os.RemoveAll(remove))
		l.await("the kubelet can register again", func() bool { return l.Ready() != "" })
		l.await("sockets", func() bool { return l.fileNames(registry)+l.fileNames(data) == "sriov.podlace.io-reg.sockdra.sock" })
		k := l.register(false)
		if got := k.unprepareClaims("c-1"); got[0] != "" || l.Ready() != "" {
			t.Errorf("%v, %s", got, l.Ready())
		}
	}
}

// TestServerFails checks that the driver's gRPC server is restarted after a fatal error, but not after a recoverable error.
func TestServerFails(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	l.register(false)
	callHandler{l.Driver}.HandleError(t.Context(), errors.New("broken pipe"), "DRA gRPC server failed")
	l.await("the failure is logged", func() bool { return strings.Contains(l.log.String(), "broken pipe") })
	l.await("the kubelet can register again", func() bool { return l.Ready() == "the kubelet has not registered driver sriov.podlace.io" })
	l.register(false)
}

// TestWhileLeading checks that an instance that loses the lead stops its tasks, keeps the lock until they have ended, and starts them
// again when it leads again. The daemon learns of it, because only the leader may change devices.
func TestWhileLeading(t *testing.T) {
	var begun, ended, told atomic.Int32
	l := newDRALab(t, func(o *Options) { o.Changed = func() { told.Add(1) } })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.holdLead(ctx, func(ctx context.Context) {
			begun.Add(1)
			<-ctx.Done()
			if l.Leads() {
				t.Error("it leads while its tasks end")
			}
			ended.Add(1)
		})
	}()
	for i := range int32(2) {
		l.await("begins", func() bool { return begun.Load() == i+1 && l.Leads() && told.Load() == i+1 })
		unlock := l.takeLead()
		l.await("ends", func() bool { return ended.Load() == i+1 && !l.Leads() })
		time.Sleep(2 * leadInterval)
		if begun.Load() != i+1 {
			t.Error("it has begun without the lead")
		}
		unlock()
	}
	cancel()
	<-done
}

// takeLead takes the lead from another instance, as an instance that runs as a service.
func (l *draLab) takeLead() (unlock func()) {
	l.Helper()
	dir, err := store.Make(filepath.Dir(l.options.Claims), 0o755)
	must(l, err, dir.Remove(leaderLock))
	lock, err := dir.Lock(0, leaderLock, 0o600)
	must(l, err)
	_, err = fmt.Fprintf(lock.File(), "%-100s\n", "the service with process 7")
	must(l, err)
	return func() { must(l, lock.Unlock()) }
}

// TestLeadLost checks that a leader whose lock file is deleted creates a new one and stays, unless another instance locks that first.
func TestLeadLost(t *testing.T) {
	l := newDRALab(t)
	a := l.newInstance("uid-a")
	a.runDriver()
	l.await("it leads", a.Leads)
	must(t, os.Remove(filepath.Join(filepath.Dir(l.options.Claims), leaderLock)))
	b := l.newInstance("uid-b")
	b.runDriver()
	time.Sleep(2 * checkInterval)
	l.await("one leads", func() bool { return a.Leads() != b.Leads() })
}
