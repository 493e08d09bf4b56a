// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
)

// helperEnv makes the test program hold a lock in the folder that it names, until standard input ends.
const helperEnv = "STORE_HELPER_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperEnv); dir != "" {
		os.Exit(holdLock(dir, os.Getenv("STORE_HELPER_LOCK")))
	}
	os.Exit(m.Run())
}

func holdLock(path, which string) int {
	d, err := Open(path)
	if err == nil && which != inheritedLock {
		_, err = takeLock(d, which)
	}
	fmt.Println("locked", err)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// inheritedLock is the name that tests use for a lock that a process inherited.
const inheritedLock = "inherited"

// takeLock locks the whole file if which is "whole", and otherwise the byte at this offset.
func takeLock(d *Dir, which string) (*Lock, error) {
	if which == "whole" {
		return d.Lock(LockTimeout, "lock", 0o600)
	}
	var offset int64
	if _, err := fmt.Sscan(which, &offset); err != nil {
		return nil, err
	}
	return d.LockAt(LockTimeout, "bytes", 0o600, offset)
}

// startHolder starts a process that holds a lock until release ends it.
func startHolder(t *testing.T, dir, which string, files ...*os.File) (release func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.ExtraFiles = files
	cmd.Env = append(os.Environ(), helperEnv+"="+dir, "STORE_HELPER_LOCK="+which)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "locked <nil>\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}
	return func() { stdin.Close(); _ = cmd.Wait() }
}

// mustWait starts a goroutine that takes the lock, and reports whether it has to wait. A free lock may take long on a busy machine, so the
// time until the goroutine counts as waiting is short only if waits is set. Then mustWait calls release and checks that the goroutine gets
// the lock.
func mustWait(t *testing.T, d *Dir, which string, waits bool, release func()) bool {
	t.Helper()
	patience := hangTimeout
	if waits {
		patience = 60 * time.Millisecond
	}
	got := make(chan error, 1)
	go func() {
		lock, err := takeLock(d, which)
		if err == nil {
			err = lock.Unlock()
		}
		got <- err
	}()
	waited := false
	select {
	case err := <-got:
		got <- err
	case <-time.After(patience):
		waited = true
	}
	release()
	if err := <-got; err != nil {
		t.Errorf("lock %s: %v", which, err)
	}
	return waited
}

func TestLocksBetweenProcesses(t *testing.T) {
	const most = "9223372036854775806" // the last byte that can be locked
	for _, c := range []struct {
		held, wanted string
		waits        bool
	}{
		{"whole", "whole", true}, {"7", "7", true}, {"7", "8", false}, {"8", "7", false}, {"0", most, false}, {most, most, true},
		{"whole", "7", false},
	} {
		dir := t.TempDir()
		release := startHolder(t, dir, c.held)
		if got := mustWait(t, open(t, dir), c.wanted, c.waits, release); got != c.waits {
			t.Errorf("%s while another process holds %s: waited %t, want %t", c.wanted, c.held, got, c.waits)
		}
	}
}

// Two goroutines exclude each other like two processes.
func TestLocksWithinProcess(t *testing.T) {
	for _, which := range []string{"whole", "7"} {
		d := open(t, t.TempDir())
		lock, err := takeLock(d, which)
		if err != nil {
			t.Fatal(err)
		}
		if !mustWait(t, d, which, true, func() { _ = lock.Unlock() }) {
			t.Errorf("%s was given twice", which)
		}
	}
}

// A child process holds the lock of its dead parent until the child ends. A live parent can release it, even for the child.
func TestLockInherited(t *testing.T) {
	for _, which := range []string{"whole", "7"} {
		for _, unlocked := range []bool{false, true} {
			d := open(t, t.TempDir())
			lock, err := takeLock(d, which)
			if err != nil {
				t.Fatal(err)
			}
			release := startHolder(t, d.Path(), inheritedLock, lock.File())
			if unlocked {
				err = lock.Unlock()
			} else {
				err = lock.File().Close() // as the kernel does when the parent dies
			}
			if err != nil {
				t.Fatal(err)
			}
			if waited := mustWait(t, d, which, !unlocked, release); waited == unlocked {
				t.Errorf("%s, unlocked %t: waited %t", which, unlocked, waited)
			}
		}
	}
}

// The wait for a held lock ends with an error after LockTimeout.
func TestLockTimeout(t *testing.T) {
	for _, which := range []string{"whole", "7"} {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			d := open(t, t.TempDir())
			lock, err := takeLock(d, which)
			if err != nil {
				t.Fatal(err)
			}
			defer lock.Unlock()
			start := time.Now()
			_, err = takeLock(d, which)
			if took := time.Since(start); plugin.Code(err) != plugin.CodeTryAgain || took < LockTimeout || took > 2*LockTimeout {
				t.Errorf("after %v: %v", took, err)
			}
		})
	}
}

// A process that has stopped waiting for a lock does not get it later.
func TestLockGivenUp(t *testing.T) {
	d := open(t, t.TempDir())
	release := startHolder(t, d.Path(), "whole")
	for range 3 {
		if _, err := d.Lock(20*time.Millisecond, "lock", 0o600); plugin.Code(err) != plugin.CodeTryAgain {
			t.Fatalf("got %v", err)
		}
	}
	release()
	for range 3 {
		lock, err := d.Lock(LockTimeout, "lock", 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Unlock(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLockCannotBeMade(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if err := os.Mkdir(path+"/lock", 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Lock(LockTimeout, "lock", 0o600); err == nil {
		t.Error("locked a folder for writing")
	}
}

// If the lock file is replaced while a process waits, it gets the lock of the new file (F-07).
func TestLockFileReplaced(t *testing.T) {
	d, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	first, err := d.Lock(LockTimeout, "lock", 0o600)
	if err != nil || first.Lost() {
		t.Fatal(err, first.Lost())
	}
	got := make(chan *Lock)
	go func() {
		l, err := d.Lock(LockTimeout, "lock", 0o600)
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	for open := 0; open < 2; { // until the other process has opened the file
		open = 0
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if to, _ := os.Readlink("/proc/self/fd/" + fd.Name()); to == d.Path()+"/lock" {
				open++
			}
		}
	}
	if err := os.Remove(d.Path() + "/lock"); err != nil {
		t.Fatal(err)
	}
	if !first.Lost() {
		t.Error("its file is gone, and the lock counts as held")
	}
	first.Unlock()
	second := <-got
	if second == nil || second.Lost() {
		t.Error("the lock of a removed file was given")
	}
	second.Unlock()
}

// With a timeout of 0, a held lock is an error, and a free one is taken.
func TestLockWithoutWait(t *testing.T) {
	d, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for name, attempt := range map[string]func() (*Lock, error){
		"file":  func() (*Lock, error) { return d.Lock(0, "lock", 0o600) },
		"range": func() (*Lock, error) { return d.LockAt(0, "range", 0o600, 7) },
	} {
		held, err := attempt()
		if err != nil {
			t.Fatal(name, err)
		}
		if _, err := attempt(); plugin.Code(err) != plugin.CodeTryAgain {
			t.Errorf("%s: a held lock: %v", name, err)
		}
		if err := held.Unlock(); err != nil {
			t.Fatal(err)
		}
		again, err := attempt()
		if err != nil {
			t.Fatalf("%s: a free lock: %v", name, err)
		}
		if err := again.Unlock(); err != nil {
			t.Error(err)
		}
	}
}
