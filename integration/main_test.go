// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"flag"
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

// Names of the variables by which the outer process tells the inner one, which
// has no network to fetch modules from, where the programs are.
const (
	binEnv   = "PODLACE_BIN"
	toolsEnv = "PODLACE_TOOLS"
)

var update = flag.Bool("update", false, "rewrite the golden output of the scripts")

func allPlugins() []string {
	return []string{"bridge", "host-local", "loopback", "portmap", "bandwidth"}
}

func TestMain(m *testing.M) {
	if os.Getenv(toolsEnv) != "" {
		kerneltest.Main(m)
		return
	}
	code, err := buildAndRun()
	if err != nil {
		fmt.Fprintln(os.Stderr, "integration:", err)
		code = 1
	}
	os.Exit(code)
}

// buildAndRun builds what the tests need, runs this program again with it and
// removes it afterwards.
func buildAndRun() (int, error) {
	dir, err := os.MkdirTemp("", "podlace-integration-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	tools := filepath.Join(dir, "tools")
	if err := build(tools, "./integration/stepper", "./integration/calico"); err != nil {
		return 0, err
	}
	if err := build(filepath.Join(tools, referenceDir), referencePlugins("main/ptp", "main/macvlan", "meta/firewall", "meta/tuning", "ipam/static")...); err != nil {
		fmt.Fprintln(os.Stderr, "integration: SKIPPING what needs other plugins of the reference:", err)
	}
	if err := build(tools, "github.com/containernetworking/plugins/plugins/ipam/host-local"); err != nil {
		fmt.Fprintln(os.Stderr, "integration: SKIPPING what needs the reference's host-local:", err)
	}
	bin := os.Getenv(binEnv)
	if bin == "" {
		bin = filepath.Join(dir, "bin")
		if err := build(bin, "./plugins/..."); err != nil {
			return 0, err
		}
	}
	if bin, err = filepath.Abs(bin); err != nil {
		return 0, err
	}
	reportMissing(bin)
	return rerun(binEnv+"="+bin, toolsEnv+"="+tools)
}

// referenceDir is the folder of the tools with the plugins of the reference that Podlace does not have.
const referenceDir = "reference"

func referencePlugins(paths ...string) (packages []string) {
	for _, p := range paths {
		packages = append(packages, "github.com/containernetworking/plugins/plugins/"+p)
	}
	return packages
}

func build(dir string, packages ...string) error {
	cmd := exec.Command("go", append([]string{"build", "-o", dir + "/"}, packages...)...)
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %q: %w\n%s", packages, err, out)
	}
	return nil
}

func reportMissing(bin string) {
	var missing []string
	for _, p := range allPlugins() {
		if !present(bin, p) {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		fmt.Fprintf(os.Stderr, "integration: SKIPPING the tests of %d of %d plugins, not in %s: %s\n",
			len(missing), len(allPlugins()), bin, strings.Join(missing, " "))
	}
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

func present(bin, plugin string) bool {
	info, err := os.Stat(filepath.Join(bin, plugin))
	return err == nil && info.Mode().IsRegular()
}

// need skips a test whose plugins are not in the folder under test.
func need(t testing.TB, plugins ...string) {
	t.Helper()
	for _, p := range plugins {
		if !present(binDir(), p) {
			t.Skipf("SKIPPED: no %s in %s", p, binDir())
		}
	}
}
