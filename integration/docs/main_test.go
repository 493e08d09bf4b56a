// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// root is the top of the source tree.
const root = "../.."

// tracedEnv names the folder of the plugins that are built to write down each change.
const tracedEnv = "PODLACE_TRACED"

var update = flag.Bool("update", false, "rewrite the listings in docs/ and the table in docs/CONFORMANCE.md")

func TestMain(m *testing.M) {
	// An ordinary user's PATH lacks the folders of nft and iptables.
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	harness.Main(m, tracedEnv, build)
}

func build(dir string) ([]string, error) {
	traced := filepath.Join(dir, "traced")
	if err := harness.Build(root, traced, "-tags=podlace_fault", "./plugins/..."); err != nil {
		return nil, err
	}
	bin, err := harness.Programs(root, filepath.Join(dir, "bin"))
	if err != nil {
		return nil, err
	}
	reference := buildReference(filepath.Join(dir, "reference"))
	return []string{harness.BinEnv + "=" + bin, tracedEnv + "=" + traced, referenceEnv + "=" + reference}, nil
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

func binDir() string { return os.Getenv(harness.BinEnv) }

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
