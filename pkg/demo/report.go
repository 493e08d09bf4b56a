// SPDX-License-Identifier: Apache-2.0

package demo

import "slices"

// A Verdict is the result of one step.
type Verdict string

// These are the possible results of a step. A row with the result Info shows a value that is not compared with anything.
const (
	OK   Verdict = "ok"
	Miss Verdict = "miss"
	Skip Verdict = "skip"
	Info Verdict = "info"
)

// A Row describes the result of one step.
type Row struct {
	Step     string  `json:"step"`
	Wanted   string  `json:"wanted,omitempty"`
	Measured string  `json:"measured"`
	Value    float64 `json:"value,omitempty"` // Measured as a number, if the value is a number
	Unit     string  `json:"unit,omitempty"`
	Result   Verdict `json:"result"`
	Note     string  `json:"note,omitempty"`
}

// A Report describes one run of the script.
type Report struct {
	Plugins  string  `json:"plugins"`
	Conflist string  `json:"conflist"`
	Kernel   string  `json:"kernel"`
	Version  string  `json:"version"`
	Rows     []Row   `json:"rows"`
	OK       int     `json:"ok"`
	Missed   int     `json:"missed"`
	Skipped  int     `json:"skipped"`
	Seconds  float64 `json:"seconds"`
}

func (r *Report) add(row Row) {
	r.Rows = append(r.Rows, row)
	switch row.Result {
	case OK:
		r.OK++
	case Miss:
		r.Missed++
	case Skip:
		r.Skipped++
	}
}

// Failed reports whether the result of any step is Miss.
func (r Report) Failed() bool { return r.Missed > 0 }

// Row returns the row of the step with the given name.
func (r Report) Row(step string) (Row, bool) {
	i := slices.IndexFunc(r.Rows, func(row Row) bool { return row.Step == step })
	if i < 0 {
		return Row{}, false
	}
	return r.Rows[i], true
}

// A Comparison contains the results of the same script with two different plugin folders.
type Comparison struct {
	Podlace   Report `json:"podlace"`
	Reference Report `json:"reference"`
}
