// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
)

// row is one item of the table.
type row struct {
	number, title, outcome        string
	points, leaks, twice, nextAdd string
	seconds                       float64
}

// event is one line of `go test -json`.
type event struct {
	Action  string
	Test    string
	Elapsed float64
	Output  string
}

// figures is what a test tells of itself.
var figures = regexp.MustCompile(`figures: points=(\d+) leaks=(\d+) duplicates=(\d+) next=(\d+) failed=(\d+)`)

// run runs the test and returns its rows, and all output.
func (t test) run(sample bool) ([]row, string, error) {
	cmd := exec.Command("go", "test", "-count=1", "-json", "-timeout=2h", "-run=^"+t.name+"$", t.dir)
	cmd.Env = os.Environ()
	if !sample {
		cmd.Env = append(cmd.Env, "FAULTS=all")
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	rows, text := t.read(out)
	if err == nil && len(rows) == 0 {
		err = fmt.Errorf("%s carries numbers and has no subtest with one", t.name)
	}
	return rows, text + stderr.String(), err
}

// read makes the rows of what go test says.
func (t test) read(out []byte) (rows []row, text string) {
	outputs, cases := map[string]string{}, 0
	var all strings.Builder
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var e event
		if dec.Decode(&e) != nil {
			break
		}
		outputs[e.Test] += e.Output
		all.WriteString(e.Output)
		ended := e.Action == "pass" || e.Action == "fail" || e.Action == "skip"
		if !ended || e.Test == "" {
			continue
		}
		if e.Test != t.name {
			cases++
		}
		var of []string // items that this is
		r := row{outcome: map[string]string{"pass": "ok", "fail": "FAILED"}[e.Action], seconds: e.Elapsed}
		if e.Action == "skip" {
			r.outcome = reason(outputs[e.Test])
		}
		switch last := path.Base(e.Test); {
		case number.MatchString(last[:min(4, len(last))]):
			r.number, r.title, _ = strings.Cut(strings.ReplaceAll(last, "_", " "), " ")
			of = append(of, r.number)
		case t.inDoc && e.Test == t.name:
			of, r.title = number.FindAllString(t.doc, -1), t.title()
			if cases > 0 {
				r.points = fmt.Sprint(cases)
			}
		}
		r.count(outputs[e.Test])
		for _, r.number = range of {
			rows = append(rows, r)
		}
	}
	return rows, all.String()
}

// count takes the figures from the output of a test.
func (r *row) count(output string) {
	if m := figures.FindStringSubmatch(output); m != nil {
		r.points, r.leaks, r.twice, r.nextAdd = m[1], m[2], m[3], m[4]+" ok"
		if m[4] == "0" {
			r.nextAdd = ""
		}
		if m[5] != "0" {
			r.nextAdd = m[5] + " of " + m[4] + " failed"
		}
	}
}

// reason is why a test was skipped.
func reason(output string) string {
	for line := range strings.Lines(output) {
		if _, why, ok := strings.Cut(line, "SKIPPED: "); ok {
			return "skipped: " + strings.TrimSpace(why)
		}
	}
	return "skipped"
}

func (r row) line() string {
	return fmt.Sprintf("%s %s: %s points, %s leaks, %.1f s: %s", r.number, r.title, r.points, r.leaks, r.seconds, r.outcome)
}

func printTable(w io.Writer, rows []row) {
	slices.SortStableFunc(rows, func(a, b row) int { return strings.Compare(a.number+a.title, b.number+b.title) })
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "item\twhat\tpoints\tleaks\tduplicates\tnext ADD\tseconds\toutcome")
	for _, r := range rows {
		fields := []string{r.number, r.title, r.points, r.leaks, r.twice, r.nextAdd}
		for i, f := range fields {
			if f == "" {
				fields[i] = "-"
			}
		}
		fmt.Fprintf(table, "%s\t%.1f\t%s\n", strings.Join(fields, "\t"), r.seconds, r.outcome)
	}
	_ = table.Flush() // the writer is stdout, or a buffer
}
