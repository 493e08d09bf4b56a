// SPDX-License-Identifier: Apache-2.0

// Package harness contains code that the tests of several folders share. Main builds the programs and runs the tests. Oracle compares the
// state of the node before and after a test. Call runs a single plugin. Network runs a whole conflist through libcni. Further functions
// send traffic.
//
// The test binary runs twice. The first run builds the programs on the machine and starts the second run. The second run executes the tests
// in a sandbox. Programs are built outside of the sandbox, because the sandbox has no network and Go may need to download modules.
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

// BinEnv is the environment variable with the folder of the tested programs. If PODLACE_BIN is not set, Main builds the programs from this
// source tree.
const BinEnv = "PODLACE_BIN"

// ToolsEnv is the environment variable with the folder of additional programs that the tests use. If PODLACE_TOOLS is not set, Main builds
// these programs.
const ToolsEnv = "PODLACE_TOOLS"

// A Tool builds additional programs for the tests and stores them in the folder of ToolsEnv.
type Tool func(dir string) error

// Main builds the tested programs and the given tools, and runs the tests of a package. TestMain of each package calls Main.
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
	bin, err := programFolder(filepath.Join(dir, "bin"))
	if err != nil {
		return 0, err
	}
	reportMissing(bin)
	return rerun([]string{BinEnv + "=" + bin, ToolsEnv + "=" + filepath.Join(dir, "tools")})
}

// Faulty is a Tool that builds the programs of this tree with the build tag podlace_fault into FaultDir.
func Faulty(dir string) error {
	return buildPackages(filepath.Join(dir, "fault"), "-tags=podlace_fault", "./plugins/...")
}

// Reference is a Tool that builds the reference plugins into ReferenceDir. If the build fails, Reference prints the reason, and tests that
// need the reference plugins are skipped.
func Reference(dir string) error {
	script := filepath.Join(sourceRoot(), "scripts/reference.sh")
	if out, err := exec.Command(script, filepath.Join(dir, "reference")).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "integration: SKIPPING tests that need the reference plugins: %v\n%s", err, out)
	}
	return nil
}

// Calico is a Tool that builds the test double of Calico's main plugin.
func Calico(dir string) error { return buildPackages(dir, "./integration/harness/calico") }

// BinDir returns the folder of the tested programs.
func BinDir() string { return os.Getenv(BinEnv) }

// FaultDir returns the folder of the programs that Faulty built.
func FaultDir() string { return filepath.Join(os.Getenv(ToolsEnv), "fault") }

// ReferenceDir returns the folder of the reference plugins.
func ReferenceDir() string { return filepath.Join(os.Getenv(ToolsEnv), "reference") }

// AllPlugins returns the names of the plugins that exist both in Podlace and in the reference project.
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

// sourceRoot returns the top folder of the source tree, which is the nearest parent folder with a go.mod. Tests run in the folder of their
// package.
func sourceRoot() string {
	dir := ".."
	for !Present(dir, "go.mod") {
		dir = filepath.Join("..", dir)
	}
	return dir
}

// buildPackages builds packages of the source tree into a folder. Flags of "go build" may precede the package names.
func buildPackages(dir string, args ...string) error {
	cmd := exec.Command("go", append([]string{"build", "-buildvcs=false", "-o", dir + "/"}, args...)...)
	cmd.Dir = sourceRoot()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %q: %w\n%s", args, err, out)
	}
	return nil
}

// programFolder returns the folder in the environment variable PODLACE_BIN. If PODLACE_BIN is not set, programFolder builds all programs of
// the source tree into a new folder.
func programFolder(dir string) (string, error) {
	if bin := os.Getenv(BinEnv); bin != "" {
		return filepath.Abs(bin)
	}
	if err := buildPackages(dir, "./plugins/..."); err != nil {
		return dir, err
	}
	cmd := exec.Command("scripts/source-hash.sh") // make install requires this file of make build
	cmd.Dir = sourceRoot()
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
