// SPDX-License-Identifier: Apache-2.0

// Package harness starts tests whose programs must be built first.
//
// The test binary has two lives: the first, on the machine, builds the programs and runs the binary again; the second runs the tests in
// a sandbox, which has no network to fetch modules from.
package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// BinEnv names the folder of the programs under test. Where it is not set, they are built from this tree.
const BinEnv = "PODLACE_BIN"

// Main is what TestMain calls. The function build puts programs into a folder, which Main removes after the tests, and returns variables of
// the environment that tell the tests where the programs are. The variable built is one of them: where it is set, the tests run.
func Main(m *testing.M, built string, build func(dir string) (env []string, err error)) {
	if os.Getenv(built) != "" {
		kerneltest.Main(m)
		return
	}
	code, err := buildAndRun(build)
	if err != nil {
		fmt.Fprintln(os.Stderr, "build of the tested programs:", err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(build func(dir string) (env []string, err error)) (int, error) {
	dir, err := os.MkdirTemp("", "podlace-test-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	env, err := build(dir)
	if err != nil {
		return 0, err
	}
	return rerun(env)
}

// Build builds packages of the source tree at root into a folder; flags of "go build" may come before them.
func Build(root, dir string, args ...string) error {
	cmd := exec.Command("go", append([]string{"build", "-buildvcs=false", "-o", dir + "/"}, args...)...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %q: %w\n%s", args, err, out)
	}
	return nil
}

// Programs returns the folder that BinEnv names, or builds all programs of the source tree at root into a folder.
func Programs(root, dir string) (string, error) {
	if bin := os.Getenv(BinEnv); bin != "" {
		return filepath.Abs(bin)
	}
	if err := Build(root, dir, "./plugins/..."); err != nil {
		return dir, err
	}
	cmd := exec.Command("scripts/source-hash.sh") // as make build does, for make install
	cmd.Dir = root
	hash, err := cmd.Output()
	if err != nil {
		return dir, err
	}
	return dir, os.WriteFile(filepath.Join(dir, ".source"), hash, 0o644)
}

func rerun(env []string) (int, error) {
	runtime.LockOSThread() // Pdeathsig follows the thread that forked
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}
