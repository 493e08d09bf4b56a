// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// mountSmall mounts a small file system over a state folder, with an initial content that depends on the folder's name.
func mountSmall(t *testing.T, dir, options string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("small", dir, "tmpfs", 0, "mode=0755,"+options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// fillDisk uses up the blocks or inodes of a file system. The returned function frees them.
func fillDisk(dir string, inodes bool) (free func() error, err error) {
	ballast := filepath.Join(dir, ".ballast")
	free = func() error { return os.RemoveAll(ballast) }
	if err := os.Mkdir(ballast, 0o700); err != nil {
		return free, err
	}
	for i := 0; ; i++ {
		size := 4096
		if inodes {
			size = 0
		}
		err := os.WriteFile(filepath.Join(ballast, fmt.Sprint(i)), make([]byte, size), 0o600)
		if errors.Is(err, unix.ENOSPC) {
			return free, nil
		}
		if err != nil || i > 1<<16 {
			return free, errors.Join(err, free())
		}
	}
}

func TestFaultDisk(t *testing.T) {
	for dir, what := range harness.InOrder(map[string]string{"/run/podlace": "records", "/var/lib/cni": "leases"}) {
		for limit, options := range harness.InOrder(map[string]string{"space": "size=256k", "inodes": "nr_inodes=64"}) {
			t.Run("F-09 no "+limit+" for the "+what, func(t *testing.T) {
				mountSmall(t, dir, options)
				testFull(t, dir, limit == "inodes")
			})
		}
		t.Run("F-10 "+what+" become read-only", func(t *testing.T) {
			mountSmall(t, dir, "size=256k")
			testReadOnly(t, dir)
		})
	}
}

// testFull: ADD fails with a code and leaves no state. DEL and GC succeed on the full disk.
func testFull(t *testing.T, dir string, inodes bool) {
	s := newSweep(t, "nftables")
	for room, refused := 0, true; refused; room++ {
		s.tryCase(t, fmt.Sprintf("ADD with room for %d", room), func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			free, err := fillDisk(dir, inodes)
			if err != nil {
				return err
			}
			for i := range room {
				err = errors.Join(err, os.Remove(filepath.Join(dir, ".ballast", fmt.Sprint(i))))
			}
			_, add := s.Do("ADD", rt, nil)
			refused = add != nil && room < 20
			if room == 0 && add == nil || room == 20 && add != nil {
				err = errors.Join(err, fmt.Errorf("ADD with room for %d: %w", room, add))
			}
			_, del := s.Do("DEL", rt, nil)
			return errors.Join(err, harness.Coded(add), del, free())
		})
	}
	for _, verb := range []string{"DEL", "GC"} {
		s.tryCase(t, verb, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if _, err := s.Do("ADD", rt, nil); err != nil {
				return err
			}
			free, err := fillDisk(dir, inodes)
			if err == nil {
				err = s.followUp(killCase{then: map[string]string{"DEL": thenDel, "GC": thenCollect}[verb], at: 1}, nil, rt)
			}
			return errors.Join(err, free())
		})
	}
	s.Report(t)
}

// testReadOnly: ADD fails with a code. DEL removes what it can, and its error lists the rest. Both succeed once the disk is writable again.
func testReadOnly(t *testing.T, dir string) {
	s := newSweep(t, "nftables")
	remount := func(flags uintptr) error { return unix.Mount("", dir, "", unix.MS_REMOUNT|flags, "") }
	s.tryCase(t, "ADD", func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
		if err := remount(unix.MS_RDONLY); err != nil {
			return err
		}
		_, err := s.Do("ADD", rt, nil)
		if err == nil {
			err = errors.New("ADD succeeded")
		} else {
			err = harness.Coded(err)
		}
		return errors.Join(err, remount(0))
	})
	for _, verb := range []string{"DEL", "GC"} {
		s.tryCase(t, verb, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			result, err := s.Do("ADD", rt, nil)
			if err == nil {
				err = errors.Join(kerneltest.Age(harness.StateDirs()...), remount(unix.MS_RDONLY)) // GC keeps recent records
			}
			if err != nil {
				return err
			}
			remove := func() error { return s.collectOthers() }
			if verb == "DEL" {
				remove = func() error { _, err := s.Do("DEL", rt, nil); return err }
			}
			err = remove()
			var doc *types.Error
			if err == nil {
				err = fmt.Errorf("%s reports that nothing remains", verb)
			} else if errors.As(err, &doc) || verb == "GC" { // libcni joins the errors of a GC
				err = nil
			}
			if _, gone := net.InterfaceByName(hostVethOf(t, result)); gone == nil && dir != "/run/podlace" {
				err = errors.Join(err, errors.New("the link is left"))
			}
			return errors.Join(err, remount(0), remove())
		})
	}
	s.Report(t)
}
