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

// TestEvents checks the list of what a cluster does to the agent. At most five lines have no test. What an admin needs of the list is in
// docs/CLUSTER.md.
func TestEvents(t *testing.T) {
	const events = "integration/docs/testdata/cluster-events.tsv"
	rows, without := checkEvents(t, events, testSource(t, "pkg/agent/nodeagent", "pkg/agent/noderoutes", "pkg/kernel", "pkg/bridge",
		"integration/faults"))
	if rows < 20 || without > 5 {
		t.Errorf("%s: %d of %d lines have no test, 5 may: write its name into their third cell", events, without, rows)
	}
}

// checkEvents checks a list of events: event, result, and the names of the tests that show it, or none. The tests must be in the source.
func checkEvents(t *testing.T, events, source string) (rows, without int) {
	t.Helper()
	for line := range strings.Lines(readFile(t, events)) {
		rows++
		cells := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		switch {
		case len(cells) != 3 || slices.Contains(cells, ""):
			t.Errorf("%s:%d: write \"EVENT\\tRESULT\\tTestName TestName\", or none in place of the tests", events, rows)
			continue
		case cells[2] == "none":
			without++
			continue
		}
		for name := range strings.FieldsSeq(cells[2]) {
			if !strings.Contains(source, "\nfunc "+name+"(t *testing.T)") {
				t.Errorf("%s:%d: there is no %s: write the name of the test that shows this event", events, rows, name)
			}
		}
	}
	return rows, without
}

// testSource returns the source of the tests in folders, each of which must have some.
func testSource(t *testing.T, dirs ...string) string {
	t.Helper()
	var source strings.Builder
	for _, dir := range dirs {
		paths, err := filepath.Glob(filepath.Join(treeRoot, dir, "*_test.go"))
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s has no tests: %v", dir, err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			source.Write(text)
		}
	}
	return source.String()
}
