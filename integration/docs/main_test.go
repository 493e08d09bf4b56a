// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// root is the top of the source tree.
const root = "../.."

// Names of the variables by which the outer process tells the inner one where the programs are: the sandbox has no network to fetch
// modules from.
const (
	binEnv    = "PODLACE_BIN"
	tracedEnv = "PODLACE_TRACED" // the same plugins, built to write down each change
)

var update = flag.Bool("update", false, "rewrite the listings in docs/ARCHITECTURE.md and the table in docs/CONFORMANCE.md")

func TestMain(m *testing.M) {
	if os.Getenv(tracedEnv) != "" {
		// An ordinary user's PATH lacks the folders of nft and iptables.
		os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
		kerneltest.Main(m)
		return
	}
	code, err := buildAndRun()
	if err != nil {
		fmt.Fprintln(os.Stderr, "docs:", err)
		code = 1
	}
	os.Exit(code)
}

// buildAndRun builds what the tests need, runs this program again with it and removes it afterwards.
func buildAndRun() (int, error) {
	dir, err := os.MkdirTemp("", "podlace-docs-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	traced := filepath.Join(dir, "traced")
	if err := build(traced, "-tags=podlace_fault"); err != nil {
		return 0, err
	}
	bin := os.Getenv(binEnv)
	if bin == "" {
		bin = filepath.Join(dir, "bin")
		if err := build(bin); err != nil {
			return 0, err
		}
	}
	if bin, err = filepath.Abs(bin); err != nil {
		return 0, err
	}
	return rerun(binEnv+"="+bin, tracedEnv+"="+traced, referenceEnv+"="+buildReference(filepath.Join(dir, "reference")))
}

// buildReference returns the folder of the reference plugins, "" when they cannot be built. What uses them is skipped then.
func buildReference(dir string) string {
	if dir := os.Getenv(referenceEnv); dir != "" {
		return dir
	}
	if out, err := exec.Command(filepath.Join(root, "scripts/reference.sh"), dir).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "docs: SKIPPING what needs the reference plugins: %v\n%s", err, out)
		return ""
	}
	return dir
}

func build(dir string, flags ...string) error {
	args := append([]string{"build", "-buildvcs=false", "-o", dir + "/"}, flags...)
	cmd := exec.Command("go", append(args, "./plugins/...")...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
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

func binDir() string { return os.Getenv(binEnv) }

// read returns a file of the source tree.
func read(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// missing skips a test for want of a tool, or fails it where everything must be there.
func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("KERNELTEST") == "require" {
		t.Fatalf("%s is not installed", what)
	}
	t.Skipf("SKIPPED: %s is not installed", what)
}
