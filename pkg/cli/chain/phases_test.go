// SPDX-License-Identifier: Apache-2.0

package chain

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestReadLog: the phases do not overlap and add up to the plugin's time, even if nested in the log. Lines of a tenant or another plugin
// are ignored.
func TestReadLog(t *testing.T) {
	began := time.UnixMicro(1_700_000_000_000_000)
	line := func(kind string, at, took int, rest string) string {
		const format = "time=2026-01-01T00:00:00.000Z level=DEBUG msg=%s plugin=bridge attachment=\"pod=a/b at=1 took=2\" at=%d took=%d %s\n"
		return fmt.Sprintf(format, kind, began.UnixMicro()+int64(at), took, rest)
	}
	setup := line("phase", 2000, 500, "name=setup")
	for name, c := range map[string]struct {
		log     string
		phases  string
		changes []Change
	}{
		"foreign": {"level=INFO msg=hello\n", "", nil},
		"empty":   {setup, "start 2000 setup 500 rest 7500", nil},
		"nested": {setup + line("phase", 3100, 200, "name=lock") + line("change", 3400, 100, `op="write lease" error=<nil>`) +
			line("phase", 3000, 1000, "name=ipam") + line("change", 5000, 2000, `op="link add a" error="file \"exists\""`) +
			line("phase", 8000, 0, "name=end"),
			"start 2000 setup 500 lock 200 ipam 700 changes 2100 rest 2500 exit 2000",
			[]Change{{"write lease", 3400 * time.Microsecond, 100 * time.Microsecond},
				{`link add a: file "exists"`, 5000 * time.Microsecond, 2000 * time.Microsecond}}},
		"side by side": {setup + line("phase", 3000, 1000, "name=lock") + line("phase", 3500, 1000, "name=record"),
			"start 2000 setup 500 lock 500 record 1000 rest 6000", nil},
		"beyond the end": {setup + line("phase", 9000, 5000, "name=record"), "start 2000 setup 500 record 1000 rest 6500", nil},
		"no phase": {setup + strings.Replace(line("phase", 3000, 1000, "name=lock"), "msg=phase", `msg="phase"x`, 1),
			"start 2000 setup 500 rest 7500", nil},
	} {
		phases, changes := readLog(c.log, began, began.Add(10*time.Millisecond))
		var got []string
		for _, p := range phases {
			got = append(got, fmt.Sprintf("%s %d", p.Name, p.Took.Microseconds()))
		}
		if text := strings.Join(got, " "); text != c.phases {
			t.Errorf("%s: got %s, want %s", name, text, c.phases)
		}
		if diff := cmp.Diff(c.changes, changes); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
