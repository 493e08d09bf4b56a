// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// work makes three changes in three processes, then one in the shell itself.
const work = `mkdir a; mkdir b; mkdir c; : > d`

func made(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func stepWork(t *testing.T, at int, policy string) (Report, int) {
	t.Helper()
	dir := t.TempDir()
	t.Chdir(dir)
	report, err := step(tracer{at: at, policy: policy, signal: unix.SIGKILL}, 10*time.Second, []string{"/bin/sh", "-c", work})
	if err != nil {
		t.Fatal(err)
	}
	return report, made(t, dir)
}

func TestCountKillsNothing(t *testing.T) {
	report, n := stepWork(t, 0, "self")
	if n != 4 || report.Killed || report.Exit != 0 || report.Points < 7 {
		t.Errorf("%d files, report %+v: want 4 files, no kill, exit 0, at least 7 points", n, report)
	}
}

// TestEveryPoint kills the whole tree at each point in turn: what exists
// afterwards must be a prefix of the work, and must grow to all of it.
func TestEveryPoint(t *testing.T) {
	last := 0
	for at := 1; ; at++ {
		report, n := stepWork(t, at, "all")
		if !report.Killed {
			if n != 4 {
				t.Errorf("beyond the last point: %d files, want 4", n)
			}
			return
		}
		if n < last || n > last+1 || report.Exit != 137 {
			t.Errorf("point %d (%s): %d files after %d, exit %d", at, report.Call, n, last, report.Exit)
		}
		last = n
	}
}

// TestRootOnly shows what a runtime's timeout does: the shell dies, the child
// that it had just started finishes its work.
func TestRootOnly(t *testing.T) {
	for at := 1; at < 20; at++ {
		report, n := stepWork(t, at, "root")
		if report.Killed && report.Call != "execve" && !report.Root {
			if n == 0 {
				t.Errorf("point %d (%s by %s): the child did not finish", at, report.Call, report.Process)
			}
			return
		}
	}
	t.Error("no point inside a child was found")
}

// TestPause runs a command while the program stands still, and lets it go on.
func TestPause(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	report, err := step(tracer{at: 2, policy: "pause", run: "mkdir b; mkdir seen"}, 10*time.Second, []string{"/bin/sh", "-c", work})
	if err != nil || !report.Killed || report.Exit != 0 || report.Output != "" || made(t, dir) != 5 {
		t.Errorf("%+v, %v, %d files", report, err, made(t, dir))
	}
}

// TestSignal sends one that the program may catch.
func TestSignal(t *testing.T) {
	t.Chdir(t.TempDir())
	report, err := step(tracer{at: 2, policy: "root", signal: unix.SIGTERM}, 10*time.Second, []string{"/bin/sh", "-c", "trap 'exit 9' TERM; " + work})
	if err != nil || report.Exit != 9 {
		t.Errorf("%+v, %v", report, err)
	}
}

func TestBadUse(t *testing.T) {
	if _, err := step(tracer{at: 1, policy: "some"}, time.Second, []string{"/bin/true"}); err == nil {
		t.Error("an unknown policy was accepted")
	}
	if _, err := step(tracer{at: 1, policy: "self"}, time.Second, nil); err == nil {
		t.Error("no program was accepted")
	}
	if _, err := step(tracer{policy: "self"}, time.Second, []string{filepath.Join(t.TempDir(), "none")}); err == nil {
		t.Error("a missing program was accepted")
	}
}
