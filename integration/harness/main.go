// SPDX-License-Identifier: Apache-2.0

// Package harness is what the tests of several folders share. Main builds the programs and runs the tests, Oracle compares the node before
// and after a test, Call runs a single plugin, and Network a whole conflist through libcni. Further functions send traffic.
package harness

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// BinEnv is the environment variable with the folder of the tested programs. Without it, Main builds those that the package needs.
const BinEnv = "PODLACE_BIN"

// toolsEnv is the environment variable with the folder of the other programs that the tests use.
const toolsEnv = "PODLACE_TOOLS"

// A Tool builds programs into a folder below dir.
type Tool func(dir string) error

// Main builds the given programs and runs the tests of a package, from its TestMain. The programs stay in build/test, so that the next run
// builds only what changed.
func Main(m *testing.M, tools ...Tool) {
	if os.Getenv(toolsEnv) != "" {
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
	dir, err := filepath.Abs(filepath.Join(sourceRoot(), "build/test"))
	if err != nil {
		return 0, err
	}
	if err := buildTools(dir, tools); err != nil {
		return 0, err
	}
	bin, err := filepath.Abs(cmp.Or(os.Getenv(BinEnv), filepath.Join(dir, "bin")))
	if err != nil {
		return 0, err
	}
	reportMissing(bin)
	return rerun([]string{BinEnv + "=" + bin, toolsEnv + "=" + dir})
}

// buildTools runs the tools under a lock, because other test binaries build into the same folder.
func buildTools(dir string, tools []Tool) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("%s: %w", lock.Name(), err)
	}
	for _, build := range tools {
		if err := build(dir); err != nil {
			return err
		}
	}
	return nil
}

// Programs builds programs of this tree, as `make build` does. It is a no-op if PODLACE_BIN is set.
func Programs(names ...string) Tool {
	return func(dir string) error {
		if os.Getenv(BinEnv) != "" {
			return nil
		}
		return buildPrograms(filepath.Join(dir, "bin"), "", names)
	}
}

// Faulty returns a Tool that builds programs of this tree with the build tag podlace_fault into FaultDir.
func Faulty(names ...string) Tool {
	return func(dir string) error { return buildPrograms(filepath.Join(dir, "fault"), "podlace_fault", names) }
}

// Reference builds the reference plugins into ReferenceDir. If that fails, it prints the reason, and tests that need them are skipped.
func Reference(dir string) error {
	script := filepath.Join(sourceRoot(), "scripts/reference.sh")
	if out, err := exec.Command(script, filepath.Join(dir, "reference")).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "integration: SKIPPING tests that need the reference plugins: %v\n%s", err, out)
	}
	return nil
}

// Calico is a Tool that builds the test double of Calico's main plugin into CalicoDir.
func Calico(dir string) error {
	return goBuild(filepath.Join(dir, "calico"), "", "./integration/harness/calico")
}

// BinDir returns the folder of the tested programs.
func BinDir() string { return os.Getenv(BinEnv) }

// FaultDir returns the folder of the programs that Faulty built.
func FaultDir() string { return filepath.Join(os.Getenv(toolsEnv), "fault") }

// ReferenceDir returns the folder of the reference plugins.
func ReferenceDir() string { return filepath.Join(os.Getenv(toolsEnv), "reference") }

// CalicoDir returns the folder of the test double of Calico's main plugin.
func CalicoDir() string { return filepath.Join(os.Getenv(toolsEnv), "calico") }

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

// sourceRoot returns the nearest parent folder with a go.mod. Tests run in the folder of their package.
func sourceRoot() string {
	dir := ".."
	for !Present(dir, "go.mod") {
		dir = filepath.Join("..", dir)
	}
	return dir
}

// buildPrograms builds programs of this tree into a folder, with the hash of the sources that "make install" requires.
func buildPrograms(dir, tags string, names []string) error {
	packages := make([]string, len(names))
	for i, name := range names {
		packages[i] = "./plugins/" + name
	}
	if err := goBuild(dir, tags, packages...); err != nil {
		return err
	}
	cmd := exec.Command("scripts/source-hash.sh")
	cmd.Dir = sourceRoot()
	hash, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", cmd, err)
	}
	return os.WriteFile(filepath.Join(dir, ".source"), hash, 0o644)
}

// goBuild builds packages into a folder. Programs that are up to date stay as they are.
func goBuild(dir, tags string, packages ...string) error {
	cmd := exec.Command("go", append([]string{"build", "-trimpath", "-buildvcs=false", "-tags=" + tags, "-o", dir + "/"}, packages...)...)
	cmd.Dir = sourceRoot()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
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
