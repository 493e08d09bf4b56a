// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// work is a tmpfs in the sandbox with the test program and the tests' temporary files. A source tree may be below /tmp or /var/tmp, and
// unix sockets need short names.
const work = "/mnt"

// protect makes the sandbox's root file system read-only, except work, Go's build cache and one other folder. Processes that a test leaves
// behind become children of this one. It needs Linux 5.12.
func protect(writable string) error {
	cache, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		return fmt.Errorf("go env GOCACHE: %w", err)
	}
	for _, dir := range []string{writable, strings.TrimSpace(string(cache))} {
		if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, "")); err != nil {
			return fmt.Errorf("bind %s: %w", dir, err)
		}
	}
	// The tests may remount it, which they could not with flags such as MS_NOSUID.
	if err := unix.Mount("tmpfs", work, "tmpfs", 0, "mode=1777"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", work, err)
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make / read-only: %w", err)
	}
	if err := os.Setenv("TMPDIR", work); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// killOrphans ends the processes that a test left behind.
func killOrphans() {
	parent := fmt.Sprintf("PPid:\t%d\n", os.Getpid())
	for {
		ended, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.ECHILD):
			return
		case ended == 0: // some still run
			running, _ := filepath.Glob("/proc/[0-9]*/status")
			for _, path := range running {
				var pid int
				text, _ := os.ReadFile(path)
				if _, err := fmt.Sscanf(path, "/proc/%d/status", &pid); err == nil && strings.Contains(string(text), parent) {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}
