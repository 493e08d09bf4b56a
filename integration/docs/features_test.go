// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli"
)

const features = "integration/docs/testdata/features.tsv"

// TestFeatures checks the list of 41 features that users of CNI plugins, meta plugins and device plugins expect, and of 25 frequent
// complaints about other SR-IOV plugins. A line has the number, the state (done, partly or not), the feature, and the evidence or the
// missing part. Make targets, tests and commands named as evidence must exist.
func TestFeatures(t *testing.T) {
	targets, commands := makeTargets(t), podlaceCommands()
	n := 0
	for line := range strings.Lines(readFile(t, features)) {
		n++
		row := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(row) != 4 || row[0] != fmt.Sprint(n) || !slices.Contains([]string{"done", "partly", "not"}, row[1]) {
			t.Fatalf("%s:%d: %q: write \"%d\tSTATE\tFEATURE\tEVIDENCE\" with the state done, partly or not", features, n, line, n)
		}
		for _, command := range backquoted(row[3]) {
			checkEvidence(t, row[0], command, targets, commands)
		}
	}
	if n != 66 {
		t.Errorf("%s has %d lines, want 66: restore the missing ones", features, n)
	}
}

// checkEvidence checks that a command in backquotes exists: make TARGET, podlace COMMAND, or go test PACKAGES -run NAMES.
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
		source := testSource(t, slices.DeleteFunc(slices.Clone(words), func(w string) bool { return !strings.HasPrefix(w, "./") })...)
		for _, name := range regexp.MustCompile(`Test\w+`).FindAllString(command, -1) {
			if !strings.Contains(source, "\nfunc "+name+"(") {
				t.Errorf("%s: row %s: %s: there is no %s: name the test that shows this feature", features, row, command, name)
			}
		}
	}
}

// podlaceCommands returns the commands of podlace, with the one that cobra adds.
func podlaceCommands() []string {
	commands := []string{"completion"}
	for _, c := range cli.Command().Commands() {
		commands = append(commands, c.Name())
	}
	return commands
}
