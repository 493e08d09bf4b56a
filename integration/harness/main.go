// SPDX-License-Identifier: Apache-2.0

// Package harness contains code that the tests of several folders share. It builds their programs and starts them (Main), compares the
// node's state before and after (Oracle), runs single plugins (Call) and whole conflists through libcni (Network), and sends traffic.
//
// The test binary runs twice. The first run, on the machine, builds the programs and runs the binary again. The second run executes
// the tests in a sandbox, which has no network for fetching modules.
package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// BinEnv is the environment variable with the folder of the tested programs. If it is not set, Main builds the programs from this
// tree.
const BinEnv = "PODLACE_BIN"

// ToolsEnv is the environment variable with the folder of additional programs that the tests use. If it is not set, Main builds them.
const ToolsEnv = "PODLACE_TOOLS"

// A Tool builds additional programs that the tests use into the folder of ToolsEnv.
type Tool func(dir string) error

// Main runs the tests of a package with the programs under test and the tools that the package needs. TestMain calls it.
func Main(m *testing.M, tools ...Tool) {
	if os.Getenv(ToolsEnv) != "" {
		kerneltest.Main(m)
		return
	}
	code, err := buildAndRun(tools)
	if err != nil {
		fmt.Fprintln(os.Stderr, "build of the tested programs:", err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(tools []Tool) (int, error) {
	dir, err := os.MkdirTemp("", "podlace-test-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	for _, build := range tools {
		if err := build(filepath.Join(dir, "tools")); err != nil {
			return 0, err
		}
	}
	bin, err := programs(filepath.Join(dir, "bin"))
	if err != nil {
		return 0, err
	}
	reportMissing(bin)
	return rerun([]string{BinEnv + "=" + bin, ToolsEnv + "=" + filepath.Join(dir, "tools")})
}

// Faulty builds the programs of this tree with the tag podlace_fault into FaultDir.
func Faulty(dir string) error {
	return build(filepath.Join(dir, "fault"), "-tags=podlace_fault", "./plugins/...")
}

// Reference builds the reference plugins into ReferenceDir. If that fails, it prints the reason, and tests that need these plugins are
// skipped.
func Reference(dir string) error {
	if out, err := exec.Command(filepath.Join(root(), "scripts/reference.sh"), filepath.Join(dir, "reference")).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "integration: SKIPPING tests that need the reference plugins: %v\n%s", err, out)
	}
	return nil
}

// Calico builds the stand-in for Calico's plugin.
func Calico(dir string) error { return build(dir, "./integration/harness/calico") }

// BinDir returns the folder of the tested programs.
func BinDir() string { return os.Getenv(BinEnv) }

// FaultDir returns the folder of the programs that Faulty built.
func FaultDir() string { return filepath.Join(os.Getenv(ToolsEnv), "fault") }

// ReferenceDir returns the folder of the reference plugins.
func ReferenceDir() string { return filepath.Join(os.Getenv(ToolsEnv), "reference") }

// AllPlugins returns the plugins that the reference has as well.
func AllPlugins() []string {
	return []string{"bridge", "host-local", "loopback", "portmap", "bandwidth"}
}

func reportMissing(bin string) {
	var missing []string
	for _, p := range AllPlugins() {
		if !Present(bin, p) {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		fmt.Fprintf(os.Stderr, "integration: SKIPPING the tests of %d of %d plugins, not in %s: %s\n",
			len(missing), len(AllPlugins()), bin, strings.Join(missing, " "))
	}
}

// Present reports whether a folder contains a program.
func Present(bin, program string) bool {
	info, err := os.Stat(filepath.Join(bin, program))
	return err == nil && info.Mode().IsRegular()
}

// Need skips the test if a plugin is missing in the tested folder.
func Need(t testing.TB, plugins ...string) {
	t.Helper()
	for _, p := range plugins {
		if !Present(BinDir(), p) {
			t.Skipf("SKIPPED: no %s in %s", p, BinDir())
		}
	}
}

// root returns the top of the source tree: the nearest parent folder with a go.mod. Tests run in the folder of their package.
func root() string {
	dir := ".."
	for !Present(dir, "go.mod") {
		dir = filepath.Join("..", dir)
	}
	return dir
}

// build builds packages of the source tree into a folder; args may begin with flags of "go build".
func build(dir string, args ...string) error {
	cmd := exec.Command("go", append([]string{"build", "-buildvcs=false", "-o", dir + "/"}, args...)...)
	cmd.Dir = root()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %q: %w\n%s", args, err, out)
	}
	return nil
}

// programs returns the folder of BinEnv, or builds all programs of the source tree into a folder.
func programs(dir string) (string, error) {
	if bin := os.Getenv(BinEnv); bin != "" {
		return filepath.Abs(bin)
	}
	if err := build(dir, "./plugins/..."); err != nil {
		return dir, err
	}
	cmd := exec.Command("scripts/source-hash.sh") // make install requires this file of make build
	cmd.Dir = root()
	hash, err := cmd.Output()
	if err != nil {
		return dir, err
	}
	return dir, os.WriteFile(filepath.Join(dir, ".source"), hash, 0o644)
}

func rerun(env []string) (int, error) {
	runtime.LockOSThread() // Pdeathsig applies to the thread that forked
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
