// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestFaultNetns changes pods' namespaces, as runtimes and administrators do.
func TestFaultNetns(t *testing.T) {
	const vanish = "umount -l /run/netns/" + victimID + " && rm /run/netns/" + victimID
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run("F-15 netns vanishes at any point of "+verb, func(t *testing.T) {
			s := newSweep(t, "nftables")
			s.atEveryPoint(t, verb, vanish, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error { return s.delWithoutNetns(rt) })
		})
	}
	t.Run("F-16 netns path leads to another pod by now", testReusedPath)
	t.Run("F-17 netns path is no namespace", testOddPath)
}

// testReusedPath runs DEL for a pod whose namespace path belongs to another pod by then.
func testReusedPath(t *testing.T) {
	s := newSweep(t, "nftables")
	s.tryCase(t, "DEL", func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
		_, err := s.Do("ADD", rt, nil)
		if err == nil {
			err = errors.Join(unix.Unmount(pod.Path, unix.MNT_DETACH), unix.Mount(s.stays.Path, pod.Path, "", unix.MS_BIND, ""))
		}
		if err != nil {
			return err
		}
		_, err = s.Do("DEL", rt, nil)
		_, checked := s.Do("CHECK", harness.Attachment(s.stays, "stays", nil), nil)
		return errors.Join(err, checked)
	})
	s.Report(t)
}

// testOddPath runs DEL with a netns path that is no pod's namespace, but a FIFO or a dangling link, for example.
func testOddPath(t *testing.T) {
	s := newSweep(t, "nftables")
	target := filepath.Join(t.TempDir(), "x")
	for title, place := range harness.InOrder(map[string]func(path string) error{
		"a file":                    func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"a folder":                  func(path string) error { return os.Mkdir(path, 0o700) },
		"a FIFO":                    func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a socket":                  func(path string) error { return unix.Mknod(path, unix.S_IFSOCK|0o600, 0) },
		"a dangling link":           func(path string) error { return os.Symlink(target, path) },
		"a link to itself":          func(path string) error { return os.Symlink(path, path) },
		"another kind of namespace": func(path string) error { return os.Symlink("/proc/self/ns/uts", path) },
		"the namespace of the node": func(path string) error { return os.Symlink("/proc/self/ns/net", path) },
		"nothing":                   func(string) error { return nil },
	}) {
		s.tryCase(t, title, func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if _, err := s.Do("ADD", rt, nil); err != nil {
				return err
			}
			if err := errors.Join(pod.Close(), place(pod.Path)); err != nil {
				return err
			}
			defer os.Remove(pod.Path)
			if _, err := s.Do("ADD", rt, nil); err == nil || harness.Coded(err) != nil {
				return fmt.Errorf("ADD there: %w", err)
			}
			_, err := s.Do("DEL", rt, nil)
			return err
		})
	}
	s.Report(t)
}
