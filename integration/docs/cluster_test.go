// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEvents checks that the tests in each row of the table "What happens when" in docs/CLUSTER.md exist. At most five rows of this table
// may have no test.
func TestEvents(t *testing.T) {
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
	_, table, _ := strings.Cut(readFile(t, "docs/CLUSTER.md"), "\n## What happens when\n")
	table, _, _ = strings.Cut(table, "\n## ")
	rows, without := 0, 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 || strings.Contains(line, "---") || strings.HasPrefix(line, "| Event ") {
			continue
		}
		rows++
		names := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(cells[3], -1)
		if len(names) == 0 {
			without++
		}
		for _, name := range names {
			if !strings.Contains(tests.String(), "\nfunc "+name[1]+"(t *testing.T)") {
				t.Errorf("docs/CLUSTER.md: \"What happens when\": %s: no package of the table has %s: write the name of the test that shows this event",
					strings.TrimSpace(cells[1]), name[1])
			}
		}
	}
	if rows < 20 || without > 5 {
		t.Errorf("docs/CLUSTER.md: \"What happens when\": %d of %d rows have no test, 5 may: write `TestName` into their third cell", without, rows)
	}
}
