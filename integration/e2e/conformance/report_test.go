// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Names of tests in testdata, which has parts of JSON reports that Ginkgo wrote for e2e.test 1.37.0.
const (
	hostPort  = "[sig-network] HostPort validates that there is no conflict between pods with same hostPort but different hostIP and protocol [LinuxOnly] [Conformance]"
	intraPod  = "[sig-network] Networking Granular Checks: Pods should function for intra-pod communication: http [Conformance] [NodeConformance]"
	large     = "[sig-network] Networking Granular Checks: Services should be able to handle large requests: http"
	resolv    = "[sig-network] DNS should support configurable pod resolv.conf"
	localhost = "[sig-network] LocalhostNodePorts should honor sessionAffinity=ClientIP for localhost NodePort [Feature:LocalhostNodePorts]"
	closeWait = "[sig-network] KubeProxy should set TCP CLOSE_WAIT timeout [Privileged]"
)

func readMerged(t *testing.T) suiteReport {
	t.Helper()
	all, err := readReport(filepath.Join("testdata", "parallel.json"))
	if err != nil {
		t.Fatal(err)
	}
	serial, err := readReport(filepath.Join("testdata", "serial.json"))
	if err != nil {
		t.Fatal(err)
	}
	all.mergeReport(serial)
	return all
}

func TestReport(t *testing.T) {
	got := readMerged(t)
	states := map[string]specState{}
	for name, one := range got.Results {
		states[name] = one.State
	}
	want := map[string]specState{
		hostPort: passed, closeWait: passed, // only in the serial part
		intraPod: passed, large: skipped, resolv: failed, localhost: failed,
	}
	if diff := cmp.Diff(want, states); diff != "" {
		t.Error(diff)
	}
	if one := got.Results[large]; one.Reason != "Requires at least 2 nodes (not -1)" || one.Took < 10*time.Second {
		t.Errorf("the skipped spec is %+v", one)
	}
	if one := got.Results[resolv]; !strings.Contains(one.Reason, "failed to verify customized name server") {
		t.Errorf("the failed spec is %+v", one)
	}
	if len(got.Trouble) > 0 {
		t.Errorf("trouble outside of specs: %q", got.Trouble)
	}
}

// TestMerge merges two results of a test in both orders. A failure takes precedence over a success, and a test that ran over "not run".
func TestMerge(t *testing.T) {
	for _, test := range []struct{ one, other, want specState }{
		{notRun, passed, passed},
		{passed, notRun, passed},
		{skipped, notRun, skipped},
		{failed, passed, failed},
		{passed, failed, failed},
		{notRun, notRun, notRun},
	} {
		got := suiteReport{Results: map[string]specResult{"spec": {Name: "spec", State: test.one}}}
		got.mergeReport(suiteReport{Results: map[string]specResult{"spec": {Name: "spec", State: test.other}}, Trouble: []string{"trouble"}})
		if got.Results["spec"].State != test.want || len(got.Trouble) != 1 {
			t.Errorf("%s and %s: %+v, want %s", test.one, test.other, got, test.want)
		}
	}
}

// TestStates: the Ginkgo states passed, pending and skipped are not failures, and every other state is a failure.
func TestStates(t *testing.T) {
	for word, want := range map[string]specState{
		"passed": passed, "pending": notRun, "skipped": notRun, "failed": failed, "panicked": failed, "timedout": failed,
		"interrupted": failed, "aborted": failed, "a word of a later Ginkgo": failed,
	} {
		got := suiteReport{Results: map[string]specResult{}}
		got.add(ginkgoSpec{LeafNodeType: "It", LeafNodeText: "spec", State: word})
		if got.Results["spec"].State != want {
			t.Errorf("%s is %q, want %q", word, got.Results["spec"].State, want)
		}
	}
}

func TestReportErrors(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.json")
	broken := filepath.Join(t.TempDir(), "broken.json")
	for path, text := range map[string]string{empty: "[]", broken: `[{"SpecReports": [`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		filepath.Join("testdata", "no-cluster.json"): "has no spec; SynchronizedBeforeSuite: Error loading client",
		empty:                  "has no spec",
		broken:                 "parse the report",
		"testdata/absent.json": "no such file",
	} {
		if _, err := readReport(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", path, err, want)
		}
	}
}

// TestBroken: a run fails if a required e2e test failed, skipped itself, did not run, or does not exist in the suite.
func TestBroken(t *testing.T) {
	got := readMerged(t)
	got.addResult(specResult{Name: "filtered", State: notRun})
	if lines := failuresOf([]string{hostPort, intraPod, closeWait}, got); len(lines) > 0 {
		t.Errorf("all passed, but %q", lines)
	}
	want := []string{
		"skipped: " + large + ": Requires at least 2 nodes (not -1)",
		"failed: " + resolv + ": failed to verify customized name server and search path: timed out waiting for the condition",
		"not run: filtered",
		"missing from the suite: renamed: write its new name into integration/e2e/conformance/specs.txt",
	}
	if diff := cmp.Diff(want, failuresOf([]string{hostPort, large, resolv, "filtered", "renamed"}, got)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{closeWait, intraPod}, unlistedSpecs([]string{hostPort}, got, passed)); diff != "" {
		t.Error(diff)
	}
}

func TestWrite(t *testing.T) {
	var out bytes.Buffer
	printOutcome(&out, "kube-proxy nftables, podlace", []string{hostPort, large, "renamed"}, readMerged(t), 90*time.Second)
	for _, want := range []string{
		"passed  *   18 s  " + hostPort,
		"skipped *   14 s  " + large + "\n                  Requires at least 2 nodes (not -1)",
		"failed     130 s  " + localhost,
		"kube-proxy nftables, podlace: 3 passed, 2 failed, 1 skipped, 0 not selected, in 1m30s",
		"1 of the 3 specs in the list (*) passed, and 2 that are not in it",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no line %q in\n%s", want, out.String())
		}
	}
	out.Reset()
	other := suiteReport{Results: map[string]specResult{hostPort: {Name: hostPort, State: failed}, intraPod: {Name: intraPod, State: passed}}}
	printDifferences(&out, [2]string{"Podlace", "the reference plugins"}, [2]suiteReport{readMerged(t), other})
	for _, want := range []string{"5 specs differ between Podlace and the reference plugins", "passed  failed   " + hostPort, "failed  not run  " + resolv} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no line %q in\n%s", want, out.String())
		}
	}
}

func TestReferenceConflist(t *testing.T) {
	got, err := referenceConflist(`["10.244.1.0/24","fd00:10:244:1::/64"]`)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`[[{"subnet":"10.244.1.0/24"}],[{"subnet":"fd00:10:244:1::/64"}]]`, `[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]`} {
		if !strings.Contains(string(got), want) {
			t.Errorf("no %s in %s", want, got)
		}
	}
	for _, wrong := range []string{"", `["10.244.1.0"]`} {
		if _, err := referenceConflist(wrong); err == nil {
			t.Errorf("no error for %q", wrong)
		}
	}
}

// TestSpecs: the list of required tests is valid for both modes of kube-proxy, and has none that the mode's label filter excludes.
func TestSpecs(t *testing.T) {
	for _, mode := range proxyModes {
		names, err := readList(strings.NewReader(specs), mode)
		if err != nil {
			t.Fatal(err)
		}
		if len(names) < 50 {
			t.Errorf("%d specs for %s, want 50 or more", len(names), mode)
		}
		for _, name := range names {
			if strings.Contains(name, "[Slow]") || strings.Contains(name, "[Disruptive]") {
				t.Errorf("%s: the run leaves out %s", mode, name)
			}
		}
	}
}
