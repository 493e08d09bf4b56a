// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/podlace/podlace/integration/markdown"
)

const absent = "-"

func (r *report) markdown() string {
	var out strings.Builder
	fmt.Fprintf(&out, "# Side by side with the reference plugins\n\nKernel %s, %d processors, load before %s, "+
		"%d rounds, %.0f s in all. Times are milliseconds, p50 / p95; ratios are of p50.\n",
		r.Kernel, r.CPUs, r.Load, r.Rounds, r.Seconds)
	for _, t := range r.markdownTables() {
		fmt.Fprintf(&out, "\n%s", t.String())
	}
	list(&out, "Skipped", r.Skipped)
	list(&out, "Failed", r.Failed)
	return out.String()
}

// markdownTables returns the tables of all groups that ran.
func (r *report) markdownTables() []*markdown.Table {
	var out []*markdown.Table
	for _, t := range []struct {
		rows  int
		table func() *markdown.Table
	}{
		{len(r.Chains), r.chainTable}, {len(r.Plugins), r.pluginTable}, {len(r.Processes), r.processTable}, {len(r.Sizes), r.sizeTable},
		{len(r.Datapath), r.pathTable}, {len(r.FirstSecond), r.burstTable}, {len(r.Growth), r.growthTable}, {len(r.Loads), r.loadTable},
		{len(r.Limits), r.limitTable},
	} {
		if t.rows > 0 {
			out = append(out, t.table())
		}
	}
	return out
}

func list(out *strings.Builder, title string, items []string) {
	fmt.Fprintf(out, "\n%s: %d\n", title, len(items))
	for _, item := range items {
		fmt.Fprintf(out, "- %s\n", item)
	}
}

func (r *report) chainTable() *markdown.Table {
	t := markdown.NewTable("Pods: p50 / p95, CPU", "pod", "verb", sidePod, "chain", sideReference, sidePod+" / "+sideReference, "bar", "",
		"chain / "+sideReference, "bar", "")
	for _, row := range r.Chains {
		t.Row(row.Chain, row.Verb, row.costCell(sidePod), row.costCell(sideOurs), row.costCell(sideReference),
			ratio(row.One.Ratio), or(row.One.Bar), or(row.One.Verdict), ratio(row.Ratio), or(row.Bar), or(row.Verdict))
	}
	return t
}

func (r *report) pluginTable() *markdown.Table {
	t := markdown.NewTable("Plugin by plugin", "chain", "verb", "plugin", sideOurs, sideReference, "ratio")
	for _, row := range r.Plugins {
		t.Row(row.Chain, row.Verb, row.Plugin, row.cell(sideOurs), row.cell(sideReference), ratio(row.Ratio))
	}
	return t
}

func (r *report) processTable() *markdown.Table {
	t := markdown.NewTable("Processes started by the plugins of the chain", "pod", "verb", sidePod, sideOurs, sideReference, "bar", "")
	for _, row := range r.Processes {
		t.Row(row.Chain, row.Verb, row.processCell(sidePod), row.processCell(sideOurs), row.processCell(sideReference), or(row.Bar),
			or(row.Verdict))
	}
	return t
}

func (r *report) sizeTable() *markdown.Table {
	t := markdown.NewTable("Binary sizes (KiB)", "plugin", sideOurs, sideReference, "ratio")
	for _, row := range r.Sizes {
		t.Row(row.Plugin, row.cell(sideOurs), row.cell(sideReference), ratio(row.Ratio))
	}
	return t
}

func (r *report) pathTable() *markdown.Table {
	t := markdown.NewTable("Throughput (TCP, one stream, no limits): Gbit/s, and CPU milliseconds per Gbit",
		"path", sideOurs, sideReference, sideBare, "ours / reference", "bar", "")
	for _, row := range r.Datapath {
		t.Row(row.Path, row.cell(sideOurs), row.cell(sideReference), row.cell(sideBare),
			ratio(row.Ratio), or(row.Bar), or(row.Verdict))
	}
	return t
}

func (r *report) burstTable() *markdown.Table {
	t := markdown.NewTable(fmt.Sprintf("First second of a %d Mbit/s pod with the runtime's burst (Mbit at the receiver)",
		podRate/1_000_000), "direction", sideOurs, sideReference, "bar", "")
	for _, row := range r.FirstSecond {
		t.Row(row.Direction, row.cell(sideOurs), row.cell(sideReference), or(row.Bar), or(row.Verdict))
	}
	return t
}

func (row chainRow) cell(side string) string {
	v, ok := row.Sides[side]
	if !ok {
		return absent
	}
	return fmt.Sprintf("%.1f / %.1f", v.P50, v.P95)
}

func (row chainRow) costCell(side string) string {
	if cell := row.cell(side); cell != absent {
		return fmt.Sprintf("%s, %.1f", cell, row.Sides[side].CPU)
	}
	return absent
}

// processCell returns the number and names of the executed programs, and the number of forks if it is larger.
func (row processRow) processCell(side string) string {
	v, ok := row.Sides[side]
	if !ok {
		return absent
	}
	programs, names := 0, []string{}
	for _, name := range slices.Sorted(maps.Keys(v.Programs)) {
		programs += v.Programs[name]
		names = append(names, fmt.Sprintf("%s %d", name, v.Programs[name]))
	}
	out := fmt.Sprint(programs)
	if len(names) > 0 {
		out += ": " + strings.Join(names, ", ")
	}
	if v.Processes > programs {
		out += fmt.Sprintf(" (%d forks)", v.Processes)
	}
	return out
}

func (row sizeRow) cell(side string) string {
	if v, ok := row.Bytes[side]; ok {
		return fmt.Sprint(v >> 10)
	}
	return absent
}

func (row pathRow) cell(side string) string {
	if v, ok := row.Gigabits[side]; ok {
		return fmt.Sprintf("%.1f, %.0f", v, row.CPU[side]*1000)
	}
	return absent
}

func (row burstRow) cell(side string) string {
	if v, ok := row.Megabits[side]; ok {
		return fmt.Sprintf("%.1f", v)
	}
	return absent
}

func ratio(v float64) string {
	if v == 0 {
		return absent
	}
	return fmt.Sprintf("%.2f", v)
}

func or(s string) string {
	if s == "" {
		return absent
	}
	return s
}
