// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/podlace/podlace/integration/markdown"
)

func directions() []string { return []string{intoPod, outOfPod} }

// figuresByLane are the results of one row.
type figuresByLane map[flowLane]float64

// ofDirection returns the results of one direction by plugin set.
func (b figuresByLane) ofDirection(direction string) map[string]figure {
	out := map[string]figure{}
	for way, value := range b {
		if way.direction == direction {
			out[way.side] = figure{Value: value}
		}
	}
	return out
}

// limitRow is a row with the throughput in percent of the limit. It passes only if both directions of Podlace's traffic are in range.
type limitRow struct {
	What    string                        `json:"what"`
	Percent map[string]map[string]float64 `json:"percent"`
	target
}

func (r *report) addLimit(what string, bar permittedShare, seen figuresByLane) {
	row := limitRow{What: what, Percent: map[string]map[string]float64{intoPod: {}, outOfPod: {}}}
	for way, percent := range seen {
		row.Percent[way.direction][way.side] = percent
	}
	in, ok := seen[flowLane{intoPod, sideOurs}]
	out, both := seen[flowLane{outOfPod, sideOurs}]
	if ok && both {
		row.target = target{Bar: bar.String(), Verdict: verdict(bar.has(in) && bar.has(out))}
	}
	r.Limits = append(r.Limits, row)
}

func (s permittedShare) has(percent float64) bool { return percent >= s.least && percent <= s.most }

func (s permittedShare) String() string {
	if s.least == 0 {
		return fmt.Sprintf("<= %.0f", s.most)
	}
	return fmt.Sprintf("%.0f-%.0f", s.least, s.most)
}

func (r *report) limitTable() *markdown.Table {
	t := markdown.NewTable(fmt.Sprintf("Limits with the runtime's burst: percent of the rate, on the wire, at the receiver; after %v where no other time is named", drained),
		"what", intoPod+": "+sideOurs, sideReference, outOfPod+": "+sideOurs, sideReference, "bar", "")
	for _, row := range r.Limits {
		t.Row(row.What, row.cell(intoPod, sideOurs), row.cell(intoPod, sideReference), row.cell(outOfPod, sideOurs),
			row.cell(outOfPod, sideReference),
			or(row.Bar), or(row.Verdict))
	}
	return t
}

func (row limitRow) cell(direction, side string) string {
	if v, ok := row.Percent[direction][side]; ok {
		return fmt.Sprintf("%.1f", v)
	}
	return absent
}
