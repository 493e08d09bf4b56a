// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// irregularFiles has a function for each irregular file type, which creates such a file.
var irregularFiles = map[string]func(path string) error{
	"FIFO":          func(path string) error { return unix.Mkfifo(path, 0o600) },
	"folder":        func(path string) error { return os.MkdirAll(filepath.Join(path, "more"), 0o700) },
	"link":          func(path string) error { return os.Symlink("/run/podlace-elsewhere/file", path) },
	"dangling link": func(path string) error { return os.Symlink("/run/podlace-elsewhere/none", path) },
	"link to FIFO":  func(path string) error { return os.Symlink("/run/podlace-elsewhere/fifo", path) },
	"device":        func(path string) error { return unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) },
	"socket": func(path string) error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Bind(fd, &unix.SockaddrUnix{Name: path})
	},
}

// makeTargets creates the targets of the symbolic links. The returned function checks that no plugin wrote to them.
func makeTargets(t *testing.T) (untouched func() error) {
	t.Helper()
	const dir = "/run/podlace-elsewhere"
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(dir+"/file", []byte("precious"), 0o600),
		unix.Mkfifo(dir+"/fifo", 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return func() error {
		data, err := os.ReadFile(dir + "/file")
		if err != nil || string(data) != "precious" {
			err = errors.Join(err, fmt.Errorf("Podlace wrote %q through a symbolic link", data))
		}
		if _, e := os.Lstat(dir + "/none"); e == nil {
			err = errors.Join(err, errors.New("Podlace created a file through a dangling symbolic link"), os.Remove(dir+"/none"))
		}
		return err
	}
}

// filePaths returns the paths of the tested pod's files and of shared files, with those of temporary files for atomic writes.
func filePaths(t *testing.T, s *killSweep) (own, shared []string) {
	t.Helper()
	pod := harness.NewPod(t, victimID)
	rt := harness.Attachment(pod, victimID, harness.Capabilities())
	s.Must(t, "ADD", rt)
	hash := attachment.Key{Network: "chain", ContainerID: victimID, IfName: "eth0"}.Hash()
	for _, dir := range []string{"/run/podlace", "/var/lib/cni/networks"} {
		if err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			data, err := os.ReadFile(path)
			switch of := string(data); {
			case strings.HasSuffix(path, hash), strings.HasPrefix(of, victimID+"\r\n"):
				own = append(own, path)
			case strings.HasPrefix(of, "stays\r\n"), strings.Contains(of, `"containerID":"stays"`):
			default:
				shared = append(shared, path)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	shared = append(shared, "/run/podlace/.logged-found-bridge-chain", "/run/podlace/.logged-unrestored-portmap-chain",
		"/run/podlace/.iptables", "/run/podlace/.bridges.lock")
	s.Must(t, "DEL", rt)
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	return append(withTemporary(own), "/run/podlace/.localhost/chain0"), withTemporary(shared)
}

func withTemporary(paths []string) []string {
	for _, path := range slices.Clone(paths) {
		paths = append(paths, filepath.Join(filepath.Dir(path), ".tmp-"+filepath.Base(path)))
	}
	return paths
}

// TestFaultIrregular puts a FIFO, folder, link, socket or device in place of each file of Podlace. No verb or command blocks forever, a
// failed verb succeeds once the object is gone, and no state remains.
func TestFaultIrregular(t *testing.T) {
	s := newSweep(t, "nftables")
	untouched := makeTargets(t)
	own, shared := filePaths(t, s)
	if len(own) < 10 || len(shared) < 20 {
		t.Fatalf("found only %d files of a pod and %d of all pods: %q %q", len(own), len(shared), own, shared)
	}
	stride := harness.Some(97, 1)
	n := kerneltest.Random(t).IntN(stride)
	for _, path := range slices.Concat(own, shared) {
		for kind, place := range harness.InOrder(irregularFiles) {
			if kind == "device" && !canMakeDevices() {
				continue // only root of the initial user namespace can create device files
			}
			// A FIFO at a record's temporary path is in every sample, because a plugin that opens it could block forever.
			if n++; n%stride != 0 && (kind != "FIFO" || !strings.Contains(path, "/.tmp-bridge-")) {
				continue
			}
			c := irregularCase{s, path, place, slices.Contains(own, path)}
			s.tryCase(t, fmt.Sprintf("a %s at %s", kind, path), func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
				return errors.Join(c.runCase(rt), untouched())
			})
		}
	}
	s.Report(t)
}

// canMakeDevices reports whether this test may create device files.
func canMakeDevices() bool {
	path := "/run/podlace-elsewhere/device"
	defer os.Remove(path)
	return irregularFiles["device"](path) == nil
}

// irregularCase is an irregular object at the path of one file.
type irregularCase struct {
	s     *killSweep
	path  string
	place func(path string) error
	own   bool // the file belongs to one pod
}

// runCase replaces the file of an attached pod by the irregular object, detaches the pod, and attaches it again while the object exists.
func (c irregularCase) runCase(rt *libcni.RuntimeConf) error {
	if _, err := c.s.Do("ADD", rt, nil); err != nil {
		return err
	}
	restore, err := c.putObject()
	errs := []error{err}
	if err == nil {
		errs = append(errs, c.runReaders(rt), c.endAttachment(rt, restore))
	}
	if restore, err = c.putObject(); err != nil {
		return errors.Join(append(errs, err)...)
	}
	_, err = c.s.Do("ADD", rt, nil)
	if err = harness.Coded(err); err != nil {
		err = fmt.Errorf("ADD: %w", err)
	}
	return errors.Join(append(errs, err, c.endAttachment(rt, restore))...)
}

// putObject replaces the file by the irregular object. restore removes it, and brings back a shared file.
func (c irregularCase) putObject() (restore func() error, err error) {
	if err := os.MkdirAll(filepath.Dir(c.path), 0o700); err != nil {
		return nil, err
	}
	former, unread := os.ReadFile(c.path)
	restore = func() error {
		if info, err := os.Lstat(c.path); err == nil && info.Mode().IsRegular() {
			return nil // a verb replaced the object
		}
		if err := os.RemoveAll(c.path); err != nil || c.own || unread != nil {
			return err
		}
		return os.WriteFile(c.path, former, 0o600)
	}
	return restore, errors.Join(os.RemoveAll(c.path), c.place(c.path))
}

// runReaders runs all verbs and commands that only read or restore state.
func (c irregularCase) runReaders(rt *libcni.RuntimeConf) error {
	var errs []error
	valid := []types.GCAttachment{{ContainerID: "stays", IfName: "eth0"}, {ContainerID: rt.ContainerID, IfName: rt.IfName}}
	for _, verb := range []string{"CHECK", "STATUS", "GC"} {
		_, err := c.s.Do(verb, rt, valid)
		if err = harness.Coded(err); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", verb, err))
		}
	}
	for _, args := range [][]string{{"ls", "-o", "json"}, {"reload"}, {"limits"}} {
		ctx, cancel := context.WithTimeout(context.Background(), harness.CallLimit)
		cmd := exec.CommandContext(ctx, filepath.Join(harness.BinDir(), "podlace"), args...)
		out, _ := cmd.CombinedOutput()
		cancel()
		if status := cmd.ProcessState.ExitCode(); status < 0 || status > 2 {
			errs = append(errs, fmt.Errorf("podlace %s: status %d: %s", args[0], status, out))
		}
	}
	return errors.Join(errs...)
}

// endAttachment runs DEL. If it fails, a second one must succeed once the irregular object is gone.
func (c irregularCase) endAttachment(rt *libcni.RuntimeConf, restore func() error) error {
	_, err := c.s.Do("DEL", rt, nil)
	if err = harness.Coded(err); err != nil {
		err = fmt.Errorf("DEL: %w", err)
	}
	err = errors.Join(err, restore())
	for _, verb := range []string{"DEL", "STATUS"} {
		if _, again := c.s.Do(verb, rt, nil); again != nil {
			err = errors.Join(err, fmt.Errorf("%s after the removal of the object: %w", verb, again))
		}
	}
	return err
}
