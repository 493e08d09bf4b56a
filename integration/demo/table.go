// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// A Table prints each row at once, so its columns have fixed widths.
type Table struct {
	w      io.Writer
	widths []int
}

const (
	measuredWidth = 22
	noteWidth     = 140
)

// NewTable prints the heading of the table for one run with a conflist.
func NewTable(w io.Writer, conflist []byte) (*Table, error) {
	c, err := newRunner("", "", conflist)
	if err != nil {
		return nil, err
	}
	t := &Table{w: w, widths: []int{len("step"), len("wanted"), measuredWidth, len("result")}}
	for _, s := range script(pluginTypes(c.List)) {
		t.widths[0] = max(t.widths[0], utf8.RuneCountInString(s.name))
		t.widths[1] = max(t.widths[1], utf8.RuneCountInString(s.want))
	}
	t.line("step", "wanted", "measured", "result", "")
	return t, nil
}

// Row prints the result of one step.
func (t *Table) Row(r Row) {
	t.line(r.Step, r.Wanted, r.Measured, r.Result.text(), clip(r.Note))
}

func (v Verdict) text() string {
	switch v {
	case Info:
		return ""
	case Miss:
		return "MISS"
	}
	return string(v)
}

func (t *Table) line(cells ...string) { writeLine(t.w, t.widths, cells) }

func writeLine(w io.Writer, widths []int, cells []string) {
	var b strings.Builder
	for i, cell := range cells {
		b.WriteString(cell)
		if i < len(widths) {
			b.WriteString(strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(cell))+2))
		}
	}
	fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
}

// PrintHead prints the plugin folder, the conflist and the namespace that the demo uses.
func PrintHead(w io.Writer, opts runOptions, namespace string) {
	fmt.Fprintf(w, "plugins    %s\nconflist   %s\nnamespace  %s: the network of this machine is not touched\n\n",
		opts.Plugins, opts.Source, namespace)
}

// PrintSummary prints how many rows have each result, and which steps were skipped.
func PrintSummary(w io.Writer, r Report) {
	fmt.Fprintln(w)
	printCounts(w, r)
}

func printCounts(w io.Writer, r Report) {
	fmt.Fprintf(w, "%d ok, %d missed, %d skipped in %.1f s (kernel %s)\n", r.OK, r.Missed, r.Skipped, r.Seconds, r.Kernel)
	reasons := map[string][]string{}
	var order []string
	for _, row := range r.Rows {
		if row.Result != Skip {
			continue
		}
		if len(reasons[row.Note]) == 0 {
			order = append(order, row.Note)
		}
		reasons[row.Note] = append(reasons[row.Note], strings.TrimSpace(row.Step))
	}
	for _, reason := range order {
		fmt.Fprintf(w, "skipped: %s (%s)\n", strings.Join(reasons[reason], "; "), reason)
	}
}

// PrintComparison prints the results of Podlace's and the reference plugins side by side, one line for each step.
func PrintComparison(w io.Writer, podlace, reference Report) {
	lines := [][]string{{"step", "wanted", "podlace", "", "reference", ""}}
	for _, ours := range podlace.Rows {
		theirs, ok := reference.Row(ours.Step)
		if !ok {
			theirs.Measured = "-"
		}
		lines = append(lines, []string{
			ours.Step, ours.Wanted, ours.Measured, ours.Result.text(), theirs.Measured, theirs.Result.text(),
		})
	}
	widths := make([]int, len(lines[0]))
	for _, cells := range lines {
		for i, cell := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, cells := range lines {
		writeLine(w, widths, cells)
	}
	printMisses(w, "podlace", podlace)
	printMisses(w, "reference", reference)
}

// PrintTimes prints how long ADD and DEL of a pod took in each run.
func PrintTimes(w io.Writer, reports []Report) {
	fmt.Fprintf(w, "\n%-34s %8s %8s\n", "", "ADD", "DEL")
	for _, r := range reports {
		add, _ := r.Row(addRow)
		del, _ := r.Row(delRow)
		fmt.Fprintf(w, "%-34s %5.1f ms %5.1f ms\n", r.Conflist, add.Value, del.Value)
	}
}

func printMisses(w io.Writer, name string, r Report) {
	fmt.Fprintf(w, "\n%s: %s\n", name, r.Plugins)
	for _, row := range r.Rows {
		if row.Result == Miss && row.Note != "" {
			fmt.Fprintf(w, "  %s: %s\n", strings.TrimSpace(row.Step), clip(row.Note))
		}
	}
	printCounts(w, r)
}

// clip shortens a note to fit into a line. The JSON output has all of it.
func clip(note string) string {
	text := []rune(strings.Join(strings.Fields(note), " "))
	if len(text) > noteWidth {
		return string(text[:noteWidth-3]) + "..."
	}
	return string(text)
}
