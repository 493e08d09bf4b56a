// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

const tinySource = `package tiny

import "errors"

func Clamp(n, limit int) int {
	if n > limit {
		n = limit
	}
	return n
}

func Both(a, b bool) bool { return a && b }

func Check(n int) error {
	if n < 0 {
		return errors.New("negative")
	}
	return nil
}

func Join(a, b string) string { return a + b }

const one = 1

func Wide() int64 { return one + one }

func Count(n int) (steps int) {
	for steps < n {
		steps++
	}
	return steps
}

func Untested() bool { return true }
`

const tinyTest = `package tiny

import (
	"os"
	"testing"
)

func want(t *testing.T, ok bool) {
	if !ok {
		t.Fail()
	}
}

// unlucky is true once while a mutant is active.
func unlucky() bool {
	active, _ := os.ReadFile("` + work + `/active")
	return string(active) != "0" && os.Mkdir("` + work + `/unlucky", 0o700) == nil
}

func TestClamp(t *testing.T) { want(t, Clamp(3, 2) == 2 && Clamp(2, 2) == 2) }
func TestBoth(t *testing.T)  { want(t, Both(true, true)); Both(true, false) }
func TestCheck(t *testing.T) { want(t, Check(-1) != nil) }
func TestJoin(t *testing.T)  { want(t, Join("a", "b") != "" && !unlucky()) }
func TestCount(t *testing.T) { want(t, Count(2) == 2) }
`

// TestTrial tries all mutants of a small package, which has each kind.
func TestTrial(t *testing.T) {
	if err := protect("/run"); err != nil { // a folder of the sandbox
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module tiny\n\ngo 1.26\n", "tiny.go": tinySource, "tiny_test.go": tinyTest} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	trial, err := newTrial(goPackage{Dir: dir, ImportPath: "tiny", Name: "tiny", GoFiles: []string{"tiny.go"}}, "1")
	if err != nil {
		t.Fatal(err)
	}
	trial.slack = time.Second
	got := map[string]verdict{}
	for _, m := range trial.mutants {
		got[m.place+" "+m.change] = "not reached"
	}
	for _, m := range trial.reached() {
		got[m.place+" "+m.change] = trial.try(m.id)
	}
	want := map[string]verdict{
		"tiny/tiny.go:6 `n > limit` is always true":                          survived, // Clamp(1, 2) is not tested
		"tiny/tiny.go:6 `n > limit` is never true":                           killed,
		"tiny/tiny.go:6 `n > limit` is `n >= limit`":                         survived, // no difference
		"tiny/tiny.go:7 `n = limit` is left out":                             killed,
		"tiny/tiny.go:12 `a && b` is always true":                            survived, // the result is not compared
		"tiny/tiny.go:12 `a && b` is never true":                             killed,
		"tiny/tiny.go:12 `a` is always true":                                 "not reached", // Both(false, true) is not tested
		"tiny/tiny.go:12 `b` is always true":                                 survived,
		"tiny/tiny.go:15 `n < 0` is always true":                             "not reached",
		"tiny/tiny.go:15 `n < 0` is never true":                              killed,
		"tiny/tiny.go:15 `n < 0` is `n <= 0`":                                "not reached",
		"tiny/tiny.go:16 `return errors.New(\"negative\")` returns no error": killed,
		"tiny/tiny.go:21 `a + b` is `a`":                                     survived,
		"tiny/tiny.go:28 `steps < n` is never true":                          killed,
		"tiny/tiny.go:28 `steps < n` is `steps <= n`":                        killed,
		"tiny/tiny.go:29 `steps++` is left out":                              timedOut,
		"tiny/tiny.go:34 `true` is inverted":                                 "not reached",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error("-want +got:\n", diff)
	}
}

// An edit of one function leaves the order of another's mutants as it is.
func TestSample(t *testing.T) {
	order := func(text string) map[string]string {
		file := filepath.Join(t.TempDir(), "tiny.go")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		var found []mutant
		if _, err := rewrite("tiny", file, "1", &found, nil); err != nil {
			t.Fatal(err)
		}
		orders := map[string]string{}
		for _, m := range found {
			orders[m.change] = m.order
		}
		return orders
	}
	before := order(tinySource)
	after := order(strings.Replace(tinySource, "if n > limit {", "if n > 100 {\n\t\tn = 100\n\t}\n\tif n > limit {", 1))
	maps.DeleteFunc(after, func(change, _ string) bool { return strings.Contains(change, "100") })
	if diff := cmp.Diff(before, after); diff != "" {
		t.Error("-before +after:\n", diff)
	}
}

func TestRates(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rates.tsv")
	rows := map[string]row{
		"pkg/a": {pkg: "pkg/a", mutants: 90, reached: 65, tried: 24, killed: 21, sample: "509fc4c6", seconds: 95},
		"pkg/b": {pkg: "pkg/b", sample: "e3b0c442"},
	}
	if err := os.WriteFile(file, []byte(header), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, r := range []row{rows["pkg/b"], {pkg: "pkg/a", tried: 1, sample: "x"}, rows["pkg/a"]} {
		if err := updateRates(file, r); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := readRates(file); err != nil || !maps.Equal(got, rows) {
		t.Errorf("read %v, %v; want %v", got, err, rows)
	}
}

func TestWorse(t *testing.T) {
	committed := row{pkg: "pkg/a", mutants: 1000, reached: 800, tried: 25, sample: "same"}
	for _, c := range []struct {
		name            string
		was             int // killed before
		reached, killed int
		sample          string
		worse           bool
	}{
		{"equal", 20, 800, 20, "same", false},
		{"better", 20, 900, 25, "same", false},
		{"one mutant less", 20, 800, 19, "same", true},
		{"another sample within two standard errors", 20, 800, 16, "other", false},
		{"another sample below two standard errors", 20, 800, 15, "other", true},
		{"reach within the tolerance", 20, 790, 20, "same", false},
		{"reach below the tolerance", 20, 789, 20, "same", true},
		{"all of another sample but one", 25, 800, 24, "other", false},
		{"all of another sample but two", 25, 800, 23, "other", true},
	} {
		committed.killed = c.was
		r := row{pkg: "pkg/a", mutants: 1000, reached: c.reached, tried: 25, killed: c.killed, sample: c.sample}
		if err := r.worse(committed); (err != nil) != c.worse {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestEveryRow: the table has a row for each package of pkg/ with tests, and for no other, so that make mutants does not fail for the lack
// of one at night.
func TestEveryRow(t *testing.T) {
	rows, err := readRates("rates.tsv")
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join("..", "..")
	tested := map[string]bool{}
	if err := filepath.WalkDir(filepath.Join(root, "pkg"), func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, "_test.go") {
			pkg, e := filepath.Rel(root, filepath.Dir(path))
			tested[pkg], err = true, errors.Join(err, e)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for pkg := range tested {
		if _, ok := rows[pkg]; !ok {
			t.Errorf("%s has no row in rates.tsv: add it with make mutants ARGS='-packages ./%s -update'", pkg, pkg)
		}
	}
	for pkg := range rows {
		if !tested[pkg] {
			t.Errorf("%s has a row in rates.tsv, and no tests: delete the row", pkg)
		}
	}
}
