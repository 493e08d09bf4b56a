// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// routesTest is the test binary of pkg/agent/noderoutes with injected faults.
const routesTest = "noderoutes.test"

func buildRoutesTest(dir string) error {
	cmd := exec.Command("go", "test", "-c", "-buildvcs=false", "-tags=podlace_fault", "-o", filepath.Join(dir, "fault", routesTest),
		"../../pkg/agent/noderoutes")
	cmd.Stderr = os.Stderr
	return cmd.Run()
}

// TestFaultRoutes lets each change of the routes to other nodes fail once and repeats the run without a fault. The routes are then as if
// nothing had failed.
func TestFaultRoutes(t *testing.T) {
	cmd := exec.Command(filepath.Join(harness.FaultDir(), routesTest), "-test.run=^TestFaultRoutes$", "-test.v")
	cmd.Dir = t.TempDir()
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "\n    --- PASS: TestFaultRoutes/") != 6 {
		t.Errorf("%v\n%s", err, out)
	}
}
