// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// partHelper is set in the runs that TestParts starts.
const partHelper = "KERNELTEST_PARTS"

// TestParts runs two tests at once, each once in a sandbox. Their lines stay together, and one verdict follows. A test that -skip names
// does not run.
func TestParts(t *testing.T) {
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if kind := os.Getenv(partHelper); kind != "" {
		t.Log("namespace " + own)
		if kind == "fail" {
			t.Error("as wanted")
		}
		return
	}
	for kind, want := range map[string]struct {
		verdict string
		code    int
	}{"pass": {"PASS", 0}, "fail": {"FAIL", 1}} {
		out, code := rerun([]string{partHelper + "=" + kind}, "-test.v", "-test.run=^Test(Parts|PodName|Random)$", "-test.skip=Random")
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if code != want.code || strings.Count(out, "\n"+want.verdict+"\n") != 1 || lines[len(lines)-1] != want.verdict {
			t.Errorf("%s: exit status %d:\n%s", kind, code, out)
		}
		begin := slices.Index(lines, "=== RUN   TestParts")
		if begin < 0 || !strings.Contains(lines[begin+1], "namespace net:") || strings.Contains(out, own) {
			t.Errorf("%s: not in a sandbox of its own:\n%s", kind, out)
		}
		for name, verdict := range map[string]string{"TestParts": want.verdict, "TestPodName": "PASS"} {
			if strings.Count(out, "\n--- "+verdict+": "+name+" ") != 1 {
				t.Errorf("%s: %s did not run once, or without the verdict %s:\n%s", kind, name, verdict, out)
			}
		}
		if strings.Contains(out, "TestRandom") {
			t.Errorf("%s: a test ran that was to be skipped:\n%s", kind, out)
		}
	}
}

// TestPartsWithoutSandbox checks that a parallel run reports missing namespaces once.
func TestPartsWithoutSandbox(t *testing.T) {
	for require, want := range map[string]int{"": 0, "require": 1} {
		out, code := rerun([]string{"TMPDIR=/run/lock", "KERNELTEST=" + require}, "-test.v", "-test.run=^Test(PodName|Random|CleanWaits)$")
		if code != want || strings.Count(out, "KernelTests (0.00s)") != 1 {
			t.Errorf("KERNELTEST=%q: exit status %d:\n%s", require, code, out)
		}
	}
}
