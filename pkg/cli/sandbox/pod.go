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

// netnsDir is the folder in which ip-netns(8) and container runtimes store network namespaces.
const netnsDir = "/run/netns"

// Pod is a network namespace that is mounted at /run/netns/<name>. Container runtimes mount namespaces in the same folder. The namespace
// exists only as long as it is mounted.
type Pod struct {
	Name string
	Path string

	closed atomic.Bool
}

// NewPod creates a new network namespace. The link lo stays down, as in a namespace that a container runtime creates.
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

// Do calls f() inside the namespace. Do uses a separate thread of the operating system, which ends after the call. Sockets and processes
// that f() creates remain in the namespace. Goroutines that f() starts run outside of the namespace. The function f() must not call
// t.FailNow, because f() runs on another goroutine.
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

// Close unmounts the namespace and removes its file. The kernel then deletes the namespace, unless a process or a socket still uses the
// namespace. Close is idempotent. Close succeeds even if another program has already removed the file.
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

// onThread calls f() on a separate thread of the operating system. The goroutine ends without unlocking its thread. The Go runtime
// therefore ends this thread, and no other goroutine can use the wrong namespace.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread must not enter another namespace, because /proc/<pid>/ns shows the namespaces of the main thread. onThread therefore
			// calls itself. During this call, the main thread stays locked. The Go runtime therefore starts the new goroutine on another thread.
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
