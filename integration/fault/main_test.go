// SPDX-License-Identifier: Apache-2.0

package fault

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

// binEnv tells the process in the sandbox, which has no network to fetch modules from, where the binaries are.
const binEnv = "PODLACE_FAULT_BIN"

func TestMain(m *testing.M) {
	if os.Getenv(binEnv) != "" {
		kerneltest.Main(m)
		return
	}
	code, err := buildAndRun()
	if err != nil {
		fmt.Fprintln(os.Stderr, "fault:", err)
		code = 1
	}
	os.Exit(code)
}

// buildAndRun builds the binaries, runs this program again with them and removes them afterwards.
func buildAndRun() (int, error) {
	dir, err := os.MkdirTemp("", "podlace-fault-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command("go", "build", "-tags", "podlace_fault", "-o", dir+"/", "./plugins/...")
	cmd.Dir = filepath.Join("..", "..")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("go build: %w\n%s", err, out)
	}
	return rerun(binEnv + "=" + dir)
}

func rerun(env ...string) (int, error) {
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
