// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
)

// draConfig is a device plugin configuration with one resource of each kind.
const draConfig = `{"resourceList": [
  {"resourceName": "fast", "api": "dra", "vf": {"vlan": 100, "maxTxRate": 1000, "trust": "on"},
   "claimMay": ["mac", "ips", "ifName", {"mtu": 9000, "vlan": "100-199"}], "selectors": {"pfNames": ["ens0f0"]}},
  {"resourceName": "Open_1", "resourcePrefix": "example.org", "api": "dra", "selectors": {"pfNames": ["ens1f0"]}},
  {"resourceName": "old", "selectors": {"pfNames": ["ens2f0"]}}]}`

// TestClasses compares the printed classes with a golden file that integration/dra-sim validates with the code of the API server.
func TestClasses(t *testing.T) {
	dir := pcitest.WriteFiles(t, map[string]string{"config.json": draConfig})
	status, stdout, stderr := run("classes", "--config-file", filepath.Join(dir, "config.json"), "--resource-prefix", "example.com")
	want, err := os.ReadFile("testdata/classes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(stdout, "\n")); diff != "" || status != 0 || stderr != "" {
		t.Errorf("status %d, %s: correct the command, or copy the lines with + into pkg/daemon/claimcheck/testdata/classes.yaml\n(-file +program)\n%s", status, stderr, diff)
	}
}

// TestClassesRefused checks that a configuration without any class is an error, not an empty output.
func TestClassesRefused(t *testing.T) {
	for config, says := range map[string]string{
		`{"resourceList": [{"resourceName": "old"}]}`: `no resource has "api": "dra", so there is no class to print`,
		`{"resourceList": [`:                          "read the configuration of the device plugin",
		`{"resourceList": [{"resourceName": "a_b", "api": "dra"}, {"resourceName": "A-b", "api": "dra"}]}`: "have the same class name, a-b.intel.com: rename one",
		`{"resourceList": [{"resourceName": "a", "api": "dra", "vf": {"vlann": 1}}]}`:                      "resourceList[0].vf.vlann: unknown key",
	} {
		dir := pcitest.WriteFiles(t, map[string]string{"config.json": config})
		status, stdout, stderr := run("classes", "--config-file", filepath.Join(dir, "config.json"))
		if status != exitFailed || stdout != "" || !strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %s%s", config, status, stdout, stderr)
		}
	}
}

func TestScalar(t *testing.T) {
	for name, want := range map[string]string{"fast.example.com": "fast.example.com", "1.2": `"1.2"`, "1.2e3": `"1.2e3"`} {
		if got := scalar(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// TestClassesOfAllNodes: classes belong to the cluster, so those of resources for other nodes are printed too.
func TestClassesOfAllNodes(t *testing.T) {
	run := func(list string) (int, string, string) {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(`{"resourceList": [`+list+`]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		return run("classes", "--config-file", file)
	}
	one := `{"resourceName": "a", "api": "dra", "hosts": ["x"]}, {"resourceName": "a", "api": "dra", "hosts": ["y"]`
	status, stdout, stderr := run(one + "}")
	if status != 0 || strings.Count(stdout, "kind: DeviceClass") != 1 || stderr != "" {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
	status, _, stderr = run(one + `, "vf": {"mtu": 1500}}`)
	if status != exitFailed || !strings.Contains(stderr, "resource intel.com/a has other settings in vf on other nodes") {
		t.Errorf("status %d, %s", status, stderr)
	}
}
