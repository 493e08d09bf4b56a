// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// TestStoppedContainers: in containers/storage, folders of ended containers remain until these are removed, so they prove nothing.
func TestStoppedContainers(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	t.Cleanup(func() { os.RemoveAll("/run/containers") })
	ended := exec.Command("/bin/true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	for id, pid := range map[string]int{"ready": 0, "stopped": 0, "lost": 0, "podman": os.Getpid(), "podman-stopped": ended.Process.Pid,
		"stopping": os.Getpid()} {
		dir := filepath.Join("/run/containers/storage/overlay-containers", id, "userdata")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if pid != 0 {
			write(t, filepath.Join(dir, "pidfile"), fmt.Sprint(pid))
		}
	}
	for name, c := range map[string]struct {
		crictl string
		want   map[string]bool
	}{
		"crictl answers": {`echo '{"items":[{"id":"ready","state":"SANDBOX_READY"},{"id":"stopped","state":"SANDBOX_NOTREADY"},{"id":"stopping","state":"SANDBOX_NOTREADY"}]}'`,
			map[string]bool{"ready": true, "podman": true}},
		"crictl fails": {"exit 1", map[string]bool{"ready": true, "stopped": true, "lost": true, "podman": true, "stopping": true}},
	} {
		script(t, filepath.Join(bin, "crictl"), c.crictl)
		if diff := cmp.Diff(c.want, AskRuntimes().Running); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestUnreadablePidfile: with a missing pidfile or that of an ended process, a container does not run. With an unreadable one it may.
func TestUnreadablePidfile(t *testing.T) {
	rt := Runtimes{}
	for name, c := range map[string]struct {
		make func(path string) error
		runs bool
	}{
		"missing":   {func(string) error { return nil }, false},
		"folder":    {func(path string) error { return os.Mkdir(path, 0o755) }, true},
		"FIFO":      {func(path string) error { return unix.Mkfifo(path, 0o644) }, true},
		"loop":      {func(path string) error { return os.Symlink("pidfile", path) }, true},
		"empty":     {func(path string) error { return os.WriteFile(path, nil, 0o644) }, true},
		"no number": {func(path string) error { return os.WriteFile(path, []byte("none\n"), 0o644) }, true},
		"too long":  {func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("1"), 1<<20), 0o644) }, true},
		"own":       {func(path string) error { return os.WriteFile(path, []byte(fmt.Sprintln(os.Getpid())), 0o644) }, true},
	} {
		dir := t.TempDir()
		if err := errors.Join(os.Mkdir(filepath.Join(dir, "userdata"), 0o755), c.make(filepath.Join(dir, "userdata/pidfile"))); err != nil {
			t.Fatal(err)
		}
		runs := make(chan bool, 1)
		go func() { runs <- rt.mayRun(dir, true) }()
		select {
		case got := <-runs:
			if got != c.runs {
				t.Errorf("%s: may run: %t", name, got)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s: it is waited for", name)
		}
	}
}
