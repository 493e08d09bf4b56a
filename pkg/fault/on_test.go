// SPDX-License-Identifier: Apache-2.0

//go:build podlace_fault

package fault

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Only the selected change fails, and the trace file contains each change.
func TestPoint(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace")
	t.Setenv(EnvTrace, trace)
	t.Setenv(EnvFailAt, "2")
	for i, op := range []string{"a", "b c", "d"} {
		if err := Point(op); (err != nil) != (i == 1) {
			t.Errorf("%s: %v", op, err)
		}
	}
	if got, err := os.ReadFile(trace); string(got) != "1 a\n2 b c\n3 d\n" {
		t.Errorf("traced %q, %v", got, err)
	}
}

// EnvRunAt kills the process at the selected change, which the file of EnvMoments contains.
func TestKill(t *testing.T) {
	if os.Getenv(EnvRunAt) != "" {
		_ = Point("a")
		Step("part of", "a")
		t.Fatal("it lives")
	}
	trace := filepath.Join(t.TempDir(), "trace")
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestKill$")
	cmd.Env = append(os.Environ(), EnvMoments+"="+trace, EnvRunAt+"=2 kill -KILL $PPID")
	err := cmd.Run()
	if got, readErr := os.ReadFile(trace); string(got) != "1 a\n2 part of a\n" || cmd.ProcessState.ExitCode() != -1 {
		t.Errorf("traced %q, %v, %v", got, err, readErr)
	}
}

// The process waits for the shell command of EnvRunAt. If it fails, its output is in the file of EnvMoments.
func TestCommand(t *testing.T) {
	dir := t.TempDir()
	trace, mark := filepath.Join(dir, "trace"), filepath.Join(dir, "mark")
	t.Setenv(EnvMoments, trace)
	t.Setenv(EnvRunAt, fmt.Sprint(moments.Load()+2, " : >", mark, "; exit 3"))
	Step("a", "b")
	if _, err := os.Stat(mark); err == nil {
		t.Error("the command ran too early")
	}
	Step("c", "d")
	if _, err := os.Stat(mark); err != nil {
		t.Error(err)
	}
	if got, _ := os.ReadFile(trace); !strings.Contains(string(got), "COMMAND FAILED: exit status 3") {
		t.Errorf("traced %q", got)
	}
}
