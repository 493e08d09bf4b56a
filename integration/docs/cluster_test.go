// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestEvents checks the list of what a cluster does to the agent. A line has the event, what the agent does, and the tests that show it, which
// must exist; at most five lines have none. docs/CLUSTER.md tells what an admin needs of it.
func TestEvents(t *testing.T) {
	const events = "integration/docs/testdata/cluster-events.tsv"
	var tests strings.Builder
	for _, dir := range []string{"pkg/agent/nodeagent", "pkg/agent/noderoutes", "pkg/kernel", "pkg/bridge", "integration/faults"} {
		paths, err := filepath.Glob(filepath.Join(treeRoot, dir, "*_test.go"))
		if err != nil || len(paths) == 0 {
			t.Fatal(dir, err)
		}
		for _, path := range paths {
			source, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			tests.Write(source)
		}
	}
	rows, without := 0, 0
	for line := range strings.Lines(readFile(t, events)) {
		cells := strings.Split(strings.TrimSpace(line), "\t")
		if len(cells) != 3 {
			t.Fatalf("%s: %q: write \"EVENT\tAGENT\tTESTS\", or none in place of the tests", events, line)
		}
		rows++
		if cells[2] == "none" {
			without++
			continue
		}
		for _, name := range strings.Split(cells[2], ", ") {
			if !strings.Contains(tests.String(), "\nfunc "+name+"(t *testing.T)") {
				t.Errorf("%s: %s: no package has %s: write the name of the test that shows this event", events, cells[0], name)
			}
		}
	}
	if rows < 20 || without > 5 {
		t.Errorf("%s: %d of %d lines have no test, 5 may: write its name into their third cell", events, without, rows)
	}
}
