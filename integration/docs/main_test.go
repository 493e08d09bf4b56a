// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// root is the top folder of the source tree.
const root = "../.."

var update = flag.Bool("update", false, "rewrite the listings in docs/ and the table in docs/CONFORMANCE.md")

func TestMain(m *testing.M) {
	// An ordinary user's PATH lacks the folders of nft and iptables.
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	harness.Main(m, harness.Faulty, harness.Reference)
}

// read returns a file of the source tree.
func read(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// missing skips a test because a tool is missing, or fails it if the environment requires all tools.
func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("KERNELTEST") == "require" {
		t.Fatalf("%s is not installed", what)
	}
	t.Skipf("SKIPPED: %s is not installed", what)
}
