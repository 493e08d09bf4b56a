// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func netnsHere(t *testing.T) string {
	t.Helper()
	link, err := os.Readlink("/proc/thread-self/ns/net")
	must(t, err)
	return link
}

func TestPodIsANamespace(t *testing.T) {
	a, b := kerneltest.NewPod(t), kerneltest.NewPod(t)
	seen := map[string]bool{netnsHere(t): true}
	for _, pod := range []*sandbox.Pod{a, b} {
		must(t, pod.Do(func() error {
			seen[netnsHere(t)] = true
			links, err := net.Interfaces()
			if len(links) != 1 || links[0].Flags&net.FlagUp != 0 {
				t.Errorf("a new pod has %v, want lo alone, down", links)
			}
			return err
		}))
	}
	if len(seen) != 3 {
		t.Errorf("host and two pods share namespaces: %v", seen)
	}
	var stat unix.Statfs_t
	must(t, unix.Statfs(a.Path, &stat))
	if stat.Type != unix.NSFS_MAGIC || a.Path != "/run/netns/"+a.Name {
		t.Errorf("%s: file system %x, want a namespace at /run/netns", a.Path, stat.Type)
	}
}

// TestPodThreadsAreThrownAway: the runtime never reuses a thread that entered a pod's namespace.
func TestPodThreadsAreThrownAway(t *testing.T) {
	pod, host := kerneltest.NewPod(t), netnsHere(t)
	for range 50 {
		must(t, pod.Do(func() error { return nil }))
	}
	var all sync.WaitGroup
	all.Add(64)
	for range 64 {
		go func() {
			defer all.Done()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			time.Sleep(time.Millisecond) // makes each goroutine need a thread
			if link, err := os.Readlink("/proc/thread-self/ns/net"); link != host {
				t.Errorf("a goroutine runs in %s, the host is %s (%v)", link, host, err)
			}
		}()
	}
	all.Wait()
	if main, err := os.Readlink("/proc/self/ns/net"); main != host {
		t.Errorf("the process shows %s as its namespace, want %s (%v)", main, host, err)
	}
}

func TestPodSocketsStay(t *testing.T) {
	pod := kerneltest.NewPod(t)
	var listener net.Listener
	must(t, pod.Do(func() (err error) {
		lo, err := netlink.LinkByName("lo")
		must(t, err)
		must(t, netlink.LinkSetUp(lo))
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	defer listener.Close()
	dial := func() error {
		conn, err := net.DialTimeout("tcp", listener.Addr().String(), time.Minute)
		if err == nil {
			conn.Close()
		}
		return err
	}
	if err := pod.Do(dial); err != nil {
		t.Errorf("from inside: %v", err)
	}
	if dial() == nil {
		t.Error("the pod's listener answers on the host")
	}
}

func TestPodErrors(t *testing.T) {
	pod := kerneltest.NewPod(t)
	if _, err := sandbox.NewPod(pod.Name); !errors.Is(err, fs.ErrExist) {
		t.Errorf("the same name again: %v", err)
	}
	for _, name := range []string{"", ".", "..", "a/b", "../x"} {
		if _, err := sandbox.NewPod(name); err == nil {
			t.Errorf("name %q was accepted", name)
		}
	}
	boom := errors.New("boom")
	if err := pod.Do(func() error { return boom }); !errors.Is(err, boom) {
		t.Errorf("error of f: %v", err)
	}
	if err := pod.Do(func() error { runtime.Goexit(); return nil }); err == nil || !strings.Contains(err.Error(), "never returned") {
		t.Errorf("f ended its goroutine: %v", err)
	}
}

func TestPodClose(t *testing.T) {
	pod, err := sandbox.NewPod("closing")
	must(t, err)
	defer pod.Close()
	fd, err := unix.Open(pod.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	err = netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "closing0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(fd)})
	_ = unix.Close(fd)
	must(t, err)

	must(t, pod.Close())
	must(t, pod.Close())
	if _, err := os.Lstat(pod.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
	if err := pod.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Do after Close: %v", err)
	}
	for range 500 { // the kernel needs some time
		if _, err := net.InterfaceByName("closing0"); err != nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the namespace lives on: the host side of its veth is still there")
}

// TestPodCloseAfterOthers closes a pod after another program removed the mount or the file of the pod.
func TestPodCloseAfterOthers(t *testing.T) {
	pod, err := sandbox.NewPod("robbed")
	must(t, err)
	must(t, unix.Unmount(pod.Path, unix.MNT_DETACH))
	if err := pod.Do(func() error { return nil }); err == nil {
		t.Error("Do worked in a plain file")
	}
	must(t, pod.Close())
	pod, err = sandbox.NewPod("robbed")
	must(t, err)
	must(t, unix.Unmount(pod.Path, unix.MNT_DETACH))
	must(t, os.Remove(pod.Path))
	must(t, pod.Close())
}
