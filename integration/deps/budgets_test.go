// SPDX-License-Identifier: Apache-2.0

package deps

import (
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/agent/nodeagent"
	"github.com/podlace/podlace/pkg/cli"
	"github.com/podlace/podlace/pkg/daemon/claimcheck"
	"github.com/podlace/podlace/pkg/daemon/deviceplugin"
)

// budgetFile has a line for each package, program and page: "lines", "bytes" or "words", the name, and the maximum. Help texts of programs
// share one line, "help".
const budgetFile = "testdata/budgets.tsv"

func budgets(t *testing.T, unit string) map[string]int64 {
	t.Helper()
	data, err := os.ReadFile(budgetFile)
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]int64{}
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			t.Fatalf("%s: %q: want a unit, a name and a number", budgetFile, line)
		}
		most, err := strconv.ParseInt(fields[2], 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", budgetFile, err)
		}
		if fields[0] == unit {
			list[fields[1]] = most
		}
	}
	return list
}

// compare reports what exceeds its budget or has none.
func compare(t *testing.T, unit string, have map[string]int64) {
	t.Helper()
	most := budgets(t, unit)
	for name, n := range have {
		if budget, ok := most[name]; !ok {
			t.Errorf("%s has no budget: add \"%s\t%s\t%d\" to integration/deps/%s", name, unit, name, n, budgetFile)
		} else if n > budget {
			t.Errorf("%s has %d %s, and its budget in integration/deps/%s is %d: delete something; raising it needs a decision in docs/dev/DECISIONS.md",
				name, n, unit, budgetFile, budget)
		}
	}
	for name := range most {
		if _, ok := have[name]; !ok {
			t.Errorf("integration/deps/%s has a budget for %s, which is gone: delete its line", budgetFile, name)
		}
	}
}

// A line of code is one with a token that is no comment. Tests do not count.
func TestBudgetLines(t *testing.T) {
	have := map[string]int64{}
	walk(t, "../../pkg", func(path string) {
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			folder, _ := filepath.Rel("../..", filepath.Dir(path))
			have[folder] += countLines(t, path)
		}
	})
	compare(t, "lines", have)
}

func countLines(t *testing.T, path string) int64 {
	t.Helper()
	source, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	file := token.NewFileSet().AddFile(path, -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, 0) // without comments
	lines := map[int]bool{}
	for {
		at, kind, text := s.Scan()
		if kind == token.EOF {
			return int64(len(lines))
		}
		if kind == token.SEMICOLON && text == "\n" {
			continue
		}
		for i := range 1 + strings.Count(text, "\n") { // a raw string has several lines
			lines[file.Line(at)+i] = true
		}
	}
}

func TestBudgetWords(t *testing.T) {
	have := map[string]int64{}
	walk(t, "../..", func(path string) {
		if strings.HasSuffix(path, ".md") {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			name, _ := filepath.Rel("../..", path)
			have[name] = int64(len(strings.Fields(string(data))))
		}
	})
	compare(t, "words", have)
}

func TestBudgetHelp(t *testing.T) {
	n := 0
	for _, table := range []string{"explain.tsv", "codes.tsv"} {
		data, err := os.ReadFile("../../pkg/cli/" + table)
		if err != nil {
			t.Fatal(err)
		}
		n += len(strings.Fields(string(data)))
	}
	var daemon strings.Builder
	deviceplugin.Main([]string{"--help"}, &daemon)
	n += len(strings.Fields(daemon.String()))
	for _, root := range []*cobra.Command{cli.Command(), nodeagent.Command(io.Discard, io.Discard), claimcheck.Command()} {
		n += wordsOfHelp(root)
	}
	compare(t, "help", map[string]int64{"explain,--help": int64(n)})
}

func wordsOfHelp(c *cobra.Command) int {
	n := len(strings.Fields(c.Long + c.UsageString()))
	for _, sub := range c.Commands() {
		n += wordsOfHelp(sub)
	}
	return n
}

func TestBudgetLinesCounts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.go")
	if err := os.WriteFile(path, []byte("// c\npackage a\n\n/* c\nc */\nvar x = `1\n\n3` // c\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := countLines(t, path); n != 4 {
		t.Error(fmt.Sprint(n), "lines, want 4")
	}
}

// walk calls f for each file of a folder, except those of git, builds and testdata.
func walk(t *testing.T, folder string, f func(path string)) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		switch name := e.Name(); {
		case err != nil:
			return err
		case e.IsDir() && (name == ".git" || name == "build" || name == "testdata"):
			return filepath.SkipDir
		case !e.IsDir():
			f(path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
