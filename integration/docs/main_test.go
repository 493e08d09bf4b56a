// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// treeRoot is the top folder of the source tree.
const treeRoot = "../.."

var update = flag.Bool("update", false, "rewrite the listings in docs/, the table of 'podlace explain', and the DeviceClass of the component dra")

func TestMain(m *testing.M) {
	// The PATH of an ordinary user does not contain the folders of nft and iptables.
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	harness.Main(m, harness.Programs(append(harness.AllPlugins(), "podlace-pod", "podlace-podresources", "sriov", "podlace", "podlace-node",
		"sriov-device-plugin")...),
		harness.Faulty(append(harness.AllPlugins(), "podlace-pod", "podlace")...), harness.Reference)
}

// updateCommand returns the command with which a test rewrites the parts of the documents that it compares.
func updateCommand(test string) string {
	return "go test ./integration/docs -run '^" + test + "$' -update"
}

// readFile returns a file of the source tree.
func readFile(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(treeRoot, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// skipMissing skips a test because a tool is missing. With KERNELTEST=require in the environment, skipMissing fails the test instead.
func skipMissing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("KERNELTEST") == "require" {
		t.Fatalf("%s is not installed", what)
	}
	t.Skipf("SKIPPED: %s is not installed", what)
}
