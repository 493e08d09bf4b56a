// SPDX-License-Identifier: Apache-2.0

package main

import "slices"

// A Verdict is the result of one step, such as "ok" or "miss".
type Verdict string

// The possible results of a step. Info shows a value for which none is expected.
const (
	OK   Verdict = "ok"
	Miss Verdict = "miss"
	Skip Verdict = "skip"
	Info Verdict = "info"
)

// A Row is the result of one step.
type Row struct {
	Step     string  `json:"step"`
	Wanted   string  `json:"wanted,omitempty"`
	Measured string  `json:"measured"`
	Value    float64 `json:"value,omitempty"` // Measured as a number, if the value is a number
	Unit     string  `json:"unit,omitempty"`
	Result   Verdict `json:"result"`
	Note     string  `json:"note,omitempty"`
}

// A Report contains the results of one run.
type Report struct {
	Plugins  string  `json:"plugins"`
	Conflist string  `json:"conflist"`
	Kernel   string  `json:"kernel"`
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

// Failed reports whether any step has the result Miss.
func (r Report) Failed() bool { return r.Missed > 0 }

// Row returns the row of a step.
func (r Report) Row(step string) (Row, bool) {
	i := slices.IndexFunc(r.Rows, func(row Row) bool { return row.Step == step })
	if i < 0 {
		return Row{}, false
	}
	return r.Rows[i], true
}
