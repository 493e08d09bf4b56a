// SPDX-License-Identifier: Apache-2.0

//go:build podlace_fault

package fault

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestPoint: the change with the number fails, once, and each is traced.
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

// TestKill: the process dies before the change with the number, which is traced.
func TestKill(t *testing.T) {
	if os.Getenv(EnvKillAt) != "" {
		_ = Point("a")
		_ = Point("b")
		t.Fatal("it lives")
	}
	trace := filepath.Join(t.TempDir(), "trace")
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestKill$")
	cmd.Env = append(os.Environ(), EnvTrace+"="+trace, EnvKillAt+"=2")
	err := cmd.Run()
	if got, readErr := os.ReadFile(trace); string(got) != "1 a\n2 b\n" || cmd.ProcessState.ExitCode() != -1 {
		t.Errorf("traced %q, %v, %v", got, err, readErr)
	}
}
