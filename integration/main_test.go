// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// toolsEnv names the folder of the programs that the tests use beside those under test.
const toolsEnv = "PODLACE_TOOLS"

var update = flag.Bool("update", false, "rewrite the golden output of the scripts")

func allPlugins() []string {
	return []string{"bridge", "host-local", "loopback", "portmap", "bandwidth"}
}

func TestMain(m *testing.M) { harness.Main(m, toolsEnv, build) }

func build(dir string) ([]string, error) {
	tools := filepath.Join(dir, "tools")
	if err := harness.Build("..", tools, "./integration/calico"); err != nil {
		return nil, err
	}
	faulty := []string{"-tags=podlace_fault", "./plugins/bridge", "./plugins/portmap", "./plugins/bandwidth"}
	if err := harness.Build("..", filepath.Join(tools, faultDir), faulty...); err != nil {
		return nil, err
	}
	others := referencePlugins("main/ptp", "main/macvlan", "meta/firewall", "meta/tuning", "ipam/static")
	if err := harness.Build("..", filepath.Join(tools, referenceDir), others...); err != nil {
		fmt.Fprintln(os.Stderr, "integration: SKIPPING what needs other plugins of the reference:", err)
	}
	if err := harness.Build("..", tools, referencePlugins("ipam/host-local")...); err != nil {
		fmt.Fprintln(os.Stderr, "integration: SKIPPING what needs the reference's host-local:", err)
	}
	bin, err := harness.Programs("..", filepath.Join(dir, "bin"))
	if err != nil {
		return nil, err
	}
	reportMissing(bin)
	return []string{harness.BinEnv + "=" + bin, toolsEnv + "=" + tools}, nil
}

// referenceDir is the folder of the tools with the plugins of the reference that Podlace does not have.
const referenceDir = "reference"

func referencePlugins(paths ...string) (packages []string) {
	for _, p := range paths {
		packages = append(packages, "github.com/containernetworking/plugins/plugins/"+p)
	}
	return packages
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

func binDir() string { return os.Getenv(harness.BinEnv) }

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
