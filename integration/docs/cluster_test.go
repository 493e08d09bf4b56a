// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The table of the agent's keys must match the schema of its configuration, which a test of pkg/agent/nodeagent compares with the code.
func TestAgentKeys(t *testing.T) {
	var schema struct{ Properties map[string]any }
	if err := json.Unmarshal([]byte(readFile(t, "conf/schema/podlace-node.schema.json")), &schema); err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, row := range parse(t, "plugins/podlace-node/README.md").rowsUnder(keysHeading) {
		listed = append(listed, backquoted(row[0])...)
	}
	slices.Sort(listed)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(schema.Properties)), listed); diff != "" {
		t.Errorf("plugins/podlace-node/README.md needs a row for each key below \"## %s\"\n(-keys +rows)\n%s", keysHeading, diff)
	}
}

// TestEvents checks the list of what a cluster does to the agent. A line has the event, what the agent does, and its tests. They must
// exist; at most five lines have none. What an admin needs of the list is in docs/CLUSTER.md.
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
