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

// routesTest is the test binary of pkg/noderoutes with faults.
const routesTest = "noderoutes.test"

// routes builds routesTest into harness.FaultDir.
func routes(dir string) error {
	cmd := exec.Command("go", "test", "-c", "-buildvcs=false", "-tags=podlace_fault", "-o", filepath.Join(dir, "fault", routesTest),
		"../../pkg/noderoutes")
	cmd.Stderr = os.Stderr
	return cmd.Run()
}

// TestFaultRoutes creates, changes and removes the routes to other nodes with a fault at each change. A retry then has the result of a
// run without the fault.
func TestFaultRoutes(t *testing.T) {
	cmd := exec.Command(filepath.Join(harness.FaultDir(), routesTest), "-test.run=^TestFaultRoutes$", "-test.v")
	cmd.Dir = t.TempDir()
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "\n    --- PASS: TestFaultRoutes/") != 6 {
		t.Errorf("%v\n%s", err, out)
	}
}
