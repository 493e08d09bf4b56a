// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// netnsDir is where ip-netns(8) and container runtimes keep network namespaces.
const netnsDir = "/run/netns"

// Pod is a network namespace that is mounted at /run/netns/<name>, as those of container runtimes are. It exists only as long as it is
// mounted.
type Pod struct {
	Name string
	Path string

	closed atomic.Bool
}

// NewPod creates a network namespace whose lo is down, as container runtimes do.
func NewPod(name string) (*Pod, error) {
	if name == "" || filepath.Base(name) != name || name == "." || name == ".." {
		return nil, fmt.Errorf("pod name %q: want a plain file name", name)
	}
	pod := &Pod{Name: name, Path: filepath.Join(netnsDir, name)}
	file, err := os.OpenFile(pod.Path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, fmt.Errorf("new pod %s: %w", name, err)
	}
	_ = file.Close() // nothing was written
	if err := onThread(pod.create); err != nil {
		_ = os.Remove(pod.Path)
		return nil, fmt.Errorf("new pod %s: %w", name, err)
	}
	return pod, nil
}

func (p *Pod) create() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("/proc/thread-self/ns/net", p.Path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount on %s: %w", p.Path, err)
	}
	return nil
}

// Do calls f inside the namespace, on an OS thread that ends afterwards. Sockets and processes that f creates stay in the namespace;
// goroutines that it starts run outside. f must not call t.FailNow, because it runs on another goroutine.
func (p *Pod) Do(f func() error) error {
	if p.closed.Load() {
		return fmt.Errorf("pod %s: %w", p.Name, os.ErrClosed)
	}
	return onThread(func() error {
		if err := setns(p.Path); err != nil {
			return fmt.Errorf("enter pod %s: %w", p.Name, err)
		}
		return f()
	})
}

// Close unmounts the namespace and removes its file. The kernel then deletes it, unless a process or socket still uses it. Close is
// idempotent, and succeeds if another program removed the file.
func (p *Pod) Close() error {
	p.closed.Store(true)
	err := unix.Unmount(p.Path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("close pod %s: unmount: %w", p.Name, err)
	}
	if err := os.Remove(p.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("close pod %s: %w", p.Name, err)
	}
	return nil
}

func setns(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("setns %s: %w", path, err)
	}
	return nil
}

// onThread calls f on an OS thread of its own. The goroutine ends without unlocking the thread, so the runtime ends it and no other
// goroutine gets the wrong namespace.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread must not enter another namespace, because /proc/<pid>/ns shows that thread's. So onThread calls itself while
			// the main thread stays locked, which makes the runtime start the goroutine on another.
			defer runtime.UnlockOSThread()
			done <- onThread(f)
			return
		}
		err := errors.New("the function never returned (runtime.Goexit, as t.FailNow does)")
		defer func() { done <- err }()
		err = f()
	}()
	return <-done
}
