// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const features = "docs/FEATURES.md"

// TestFeatures checks that the tables in docs/FEATURES.md contain each of the row numbers 1 to 41 exactly once. The document must also
// contain the correct number of rows for each state. Make targets, tests and commands of podlace in the table must exist.
func TestFeatures(t *testing.T) {
	d := parse(t, features)
	targets, commands := makeTargets(t), podlaceCommands(t)
	counts, seen := map[string]int{}, map[string]bool{}
	for _, table := range d.tables {
		if len(table.head) != 5 {
			continue
		}
		for _, row := range table.rows {
			if seen[row[0]] || !slices.Contains([]string{"done", "partly", "not"}, row[2]) {
				t.Errorf("%s: row %s is there twice, or has the state %q: remove the second row, or write done, partly or not", features, row[0], row[2])
			}
			seen[row[0]] = true
			counts[row[2]]++
			for _, command := range backquoted(row[3]) {
				checkEvidence(t, row[0], command, targets, commands)
			}
		}
	}
	for n := range 41 {
		if !seen[fmt.Sprint(n+1)] {
			t.Errorf("%s lacks row %d: restore \"| %d | FEATURE | STATE | EVIDENCE | RUN |\"", features, n+1, n+1)
		}
	}
	for _, table := range d.tables {
		if table.head[0] != "State" {
			continue
		}
		for _, row := range table.rows {
			if row[1] != fmt.Sprint(counts[row[0]]) {
				t.Errorf("%s: the first table counts %s rows with the state %s: write %d", features, row[1], row[0], counts[row[0]])
			}
		}
	}
}

// checkEvidence checks that a command in backquotes exists. A command has one of three forms: make TARGET, podlace
// COMMAND, or go test PACKAGES -run NAMES.
func checkEvidence(t *testing.T, row, command string, targets, commands []string) {
	t.Helper()
	words := strings.Fields(command)
	switch {
	case len(words) < 2:
	case words[0] == "make" && !slices.Contains(targets, words[1]):
		t.Errorf("%s: row %s: the Makefile has no target %s: name the command that shows this feature", features, row, words[1])
	case words[0] == "podlace" && !slices.Contains(commands, words[1]):
		t.Errorf("%s: row %s: podlace has no command %s: name the command that shows this feature", features, row, words[1])
	case strings.HasPrefix(command, "go test "):
		var source strings.Builder
		for _, w := range words[2:] {
			files, _ := filepath.Glob(filepath.Join(treeRoot, w, "*_test.go"))
			for _, file := range files {
				data, _ := os.ReadFile(file)
				source.Write(data)
			}
		}
		for _, name := range regexp.MustCompile(`Test\w+`).FindAllString(command, -1) {
			if !strings.Contains(source.String(), "\nfunc "+name+"(") {
				t.Errorf("%s: row %s: %s: there is no %s: name the test that shows this feature", features, row, command, name)
			}
		}
	}
}

// podlaceCommands returns the commands with a heading in plugins/podlace/README.md, and the commands that cobra adds.
func podlaceCommands(t *testing.T) []string {
	t.Helper()
	commands := []string{"completion"}
	for _, heading := range parse(t, "plugins/podlace/README.md").headings {
		if words := strings.Fields(heading); len(words) > 1 && words[0] == "podlace" {
			commands = append(commands, words[1])
		}
	}
	return commands
}
