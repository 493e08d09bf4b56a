// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/snapshot"
)

// runLimits runs `podlace limits` for the pod and lets change number failAt fail; 0 means none.
func (w faultWorld) runLimits(failAt int, flags ...string) (changes []string, out string, err error) {
	w.Helper()
	trace := filepath.Join(w.TempDir(), "trace")
	args := append([]string{"limits", "shop/web-0", "--interval", "10ms"}, flags...)
	cmd := exec.Command(filepath.Join(harness.FaultDir(), "podlace"), args...)
	cmd.Env = []string{"PODLACE_FAULT_TRACE=" + trace, fmt.Sprint("PODLACE_FAIL_AT=", failAt)}
	text, err := cmd.CombinedOutput()
	ops, _ := os.ReadFile(trace) // the file does not exist if nothing was changed
	return strings.Split(strings.TrimSpace(string(ops)), "\n"), string(text), err
}

// TestLimits lets each change of `podlace limits` fail once. The command reports the fault and restores the old limits. CHECK then succeeds
// with the limits that the runtime requested.
func TestLimits(t *testing.T) {
	w := newWorld(t, fullChain("nftables")[2:])
	result := w.addChain(1)
	otherMAC := regexp.MustCompile(`^host: link bwp\w+ changed: mac \S+ -> \S+$`) // of a recreated ifb device
	before := w.take()
	for _, flags := range [][]string{{"--ingress", "5M", "--egress", "6M"}, {"--ingress", "none"}, {"--egress", "none"},
		{"--ingress", "none", "--egress", "none"}} {
		changes, out, err := w.runLimits(0, flags...)
		if err != nil || len(changes) < 3 {
			t.Fatalf("%q: %v, %s, %q", flags, err, out, changes)
		}
		w.addChain(1)
		for i, op := range changes {
			w.Run(fmt.Sprint(strings.Join(flags, " "), " ", op), func(t *testing.T) {
				w := w.inSubtest(t)
				_, out, err := w.runLimits(i+1, flags...)
				if err == nil || !strings.Contains(out, "the limits of pod shop/web-0 are unchanged: ") ||
					!strings.Contains(out, fmt.Sprintf("injected fault at change %d ", i+1)) {
					t.Errorf("%v, %s", err, out)
				}
				for _, line := range snapshot.Diff(before, w.take()) {
					if !otherMAC.MatchString(line) {
						t.Error(line)
					}
				}
				w.callOf(0, "CHECK", result).mustRun(t)
			})
		}
	}
	w.delChain(1)
	w.checkSame(w.base)
}
