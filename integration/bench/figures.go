// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/podlace/podlace/integration/markdown"
)

// figure is a time of one plugin set in milliseconds: Value under the row's condition, such as 1,000 other pods, and Base without it. Base
// is 0 if the row compares Podlace with the reference plugins.
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

// figureRow is a table row with the times of both plugin sets. The ratio is Podlace's Value to its Base in the table Growth, and that of
// the two plugin sets in Loads. A row may have a permitted maximum.
type figureRow struct {
	What  string            `json:"what"`
	Sides map[string]figure `json:"sides"`
	target
}

// The permitted maximum ratios. Only rows whose result Podlace alone decides have one; others depend on how long the machine takes to start
// a process, or on what the kernel does with many links.
const (
	growthBar = 1.3 // two measurements of a verb of 3 ms differ by up to a fifth
	driftBar  = 1.1
)

// addGrowth adds a row that compares two times of one plugin set, for example with and without other pods. A bar of 0 means no maximum.
func (r *report) addGrowth(what string, bar float64, sides map[string]figure) {
	row := figureRow{What: what, Sides: sides}
	if ours, ok := sides[sideOurs]; ok {
		row.target = compareAtMost(ours.Value, ours.Base, bar)
	}
	r.Growth = append(r.Growth, row)
}

// addLoad adds a row that compares Podlace with the reference plugins. A bar of 0 means no maximum.
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

// p50 returns the median in milliseconds.
func p50(samples []time.Duration) float64 { return milliseconds(percentile(samples, 50)) }

// thousands formats a number with a comma as the thousands separator: 12,345.
func thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
