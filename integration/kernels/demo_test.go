// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// Debian's kernels have all features that the demo uses, so it may skip no step.
func TestDemo(t *testing.T) {
	cmd := exec.Command("../../build/kernels/demo", "-plugins", harness.BinDir(), "-json")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, runErr := cmd.Output()
	var reports []struct {
		Conflist            string
		OK, Missed, Skipped int
		Seconds             float64
		Rows                []struct{ Step, Wanted, Measured, Result, Note string }
	}
	if err := json.Unmarshal(out, &reports); err != nil || len(reports) != 2 {
		t.Fatalf("%v, %v\n%s%s", runErr, err, out, stderr.String())
	}
	for _, report := range reports {
		for _, row := range report.Rows {
			if row.Result == "miss" || row.Result == "skip" {
				t.Errorf("%s: %s: %s: wanted %s, measured %s %s", report.Conflist, row.Result, row.Step, row.Wanted, row.Measured, row.Note)
			}
		}
		if report.OK == 0 {
			t.Errorf("%s: no step of the demo succeeded", report.Conflist)
		}
		t.Logf("%s: %d ok, %d missed, %d skipped in %.1f s", report.Conflist, report.OK, report.Missed, report.Skipped, report.Seconds)
	}
}
