// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

const treeRoot = "../.."

var update = flag.Bool("update", false, "rewrite the listings in docs/, the table of 'podlace explain', and the DeviceClass of the component dra")

func TestMain(m *testing.M) {
	// An ordinary user's PATH does not have the folders of nft and iptables.
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	harness.Main(m, harness.Programs(append(harness.AllPlugins(), "podlace-pod", "podlace-podresources", "sriov", "podlace", "podlace-node",
		"sriov-device-plugin")...),
		harness.Faulty(append(harness.AllPlugins(), "podlace-pod", "podlace")...), harness.Reference)
}

// updateCommand returns the command that rewrites the parts of the documents that a test compares.
func updateCommand(test string) string {
	return "go test ./integration/docs -run '^" + test + "$' -update"
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(treeRoot, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// skipMissing skips a test for want of a tool, or fails it if KERNELTEST=require is set.
func skipMissing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("KERNELTEST") == "require" {
		t.Fatalf("%s is not installed", what)
	}
	t.Skipf("SKIPPED: %s is not installed", what)
}
