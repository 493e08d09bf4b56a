// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/demo"
)

// TestDemo runs `podlace demo`. Debian's kernels have all features that the demo uses, so no step may be skipped.
func TestDemo(t *testing.T) {
	cmd := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "demo", "-o", "json")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, runErr := cmd.Output()
	var reports []demo.Report
	if err := json.Unmarshal(out, &reports); err != nil || len(reports) != 2 {
		t.Fatalf("%v, %v\n%s%s", runErr, err, out, stderr.String())
	}
	for _, report := range reports {
		for _, row := range report.Rows {
			if row.Result == demo.Miss || row.Result == demo.Skip {
				t.Errorf("%s: %s: %s: wanted %s, measured %s %s", report.Conflist, row.Result, row.Step, row.Wanted, row.Measured, row.Note)
			}
		}
		if report.OK == 0 {
			t.Errorf("%s: no step of the demo succeeded", report.Conflist)
		}
		t.Logf("%s: %d ok, %d missed, %d skipped in %.1f s", report.Conflist, report.OK, report.Missed, report.Skipped, report.Seconds)
	}
}
