// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/podlace/podlace/integration/markdown"
)

// The type figure contains a measured time of one plugin set in milliseconds. The field Value is the time under the condition that the
// row's name states, for example on a node with 1,000 other pods. The field Base is the time without this condition. Base is 0 if the row
// compares Podlace with the reference plugins.
type figure struct {
	Base  float64 `json:"base,omitempty"`
	Value float64 `json:"value"`
	Note  string  `json:"note,omitempty"` // additional remark
}

func (f figure) growth() float64 {
	if f.Base == 0 {
		return 0
	}
	return f.Value / f.Base
}

// The type figureRow is a table row with the times of Podlace and of the reference plugins. In the table Growth, the ratio is that of
// Podlace's Value to Podlace's Base. In the table Loads, it is that of the two plugin sets. A row may have a permitted maximum ratio.
type figureRow struct {
	What  string            `json:"what"`
	Sides map[string]figure `json:"sides"`
	target
}

// The following constants are the permitted maximum ratios in the report. A row has such a bar if only Podlace decides its result. Other
// rows depend on how long the machine takes to start a process, or on what the kernel does with many links.
const (
	growthBar = 1.3 // two measurements of a verb of 3 ms differ by up to a fifth
	driftBar  = 1.1
)

// addGrowth adds a table row that compares two times of the same plugin set, for example with and without other pods. If `bar` is 0, no
// maximum applies.
func (r *report) addGrowth(what string, bar float64, sides map[string]figure) {
	row := figureRow{What: what, Sides: sides}
	if ours, ok := sides[sideOurs]; ok {
		row.target = compareAtMost(ours.Value, ours.Base, bar)
	}
	r.Growth = append(r.Growth, row)
}

// addLoad adds a table row that compares Podlace with the reference plugins. If `bar` is 0, no maximum applies.
func (r *report) addLoad(what string, bar float64, sides map[string]figure) {
	r.Loads = append(r.Loads, figureRow{what, sides, compareAtMost(sides[sideOurs].Value, sides[sideReference].Value, bar)})
}

func (r *report) growthTable() *markdown.Table {
	t := markdown.NewTable("Cost beside existing leases, hostPorts and pods: p50 without and with them", "what", sideOurs, "ratio",
		sideReference, "ratio", "bar", "")
	for _, row := range r.Growth {
		t.Row(row.What, row.growthCell(sideOurs), ratio(row.Ratio), row.growthCell(sideReference), ratio(row.Sides[sideReference].growth()),
			or(row.Bar), or(row.Verdict))
	}
	return t
}

func (r *report) loadTable() *markdown.Table {
	t := markdown.NewTable("Bulk operations and absolute times (ms)", "what", sideOurs, sideReference, "ratio", "bar", "")
	for _, row := range r.Loads {
		t.Row(row.What, row.loadCell(sideOurs), row.loadCell(sideReference), ratio(row.Ratio), or(row.Bar), or(row.Verdict))
	}
	return t
}

func (row figureRow) growthCell(side string) string {
	v, ok := row.Sides[side]
	if !ok {
		return absent
	}
	return fmt.Sprintf("%.1f, %.1f", v.Base, v.Value)
}

func (row figureRow) loadCell(side string) string {
	v, ok := row.Sides[side]
	switch {
	case !ok:
		return absent
	case v.Note != "":
		return v.Note
	default:
		return fmt.Sprintf("%.1f", v.Value)
	}
}

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1000 }

// p50 returns the median of the times in milliseconds.
func p50(samples []time.Duration) float64 { return milliseconds(percentile(samples, 50)) }

// The function thousands() formats a number with a comma as the thousands separator: 12,345.
func thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
