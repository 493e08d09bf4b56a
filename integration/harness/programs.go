// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// HoldLock holds a flock(2) and an fcntl(2) lock on a file, like another process, until the returned function is called.
func HoldLock(t *testing.T, path string) (free func()) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err == nil {
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	free = sync.OnceFunc(func() { _ = f.Close() })
	t.Cleanup(free)
	return free
}

// NeedBackend skips the test if the programs of a backend are not installed.
func NeedBackend(t *testing.T, backend string) {
	t.Helper()
	if _, err := exec.LookPath("iptables"); err != nil && backend == "iptables" {
		t.Skip("SKIPPED: no iptables program")
	}
}

// Await repeats ok until it returns true, and fails the test after CallLimit.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(CallLimit); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timeout while waiting for %s", what)
		}
	}
}

// Program returns the path of a program, or skips the test.
func Program(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("SKIPPED: no program %s", name)
	}
	return path
}

// Shell runs a command line on the node.
func Shell(t testing.TB, line string) string {
	t.Helper()
	out, err := exec.Command("/bin/sh", "-ec", line).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
	return string(out)
}
