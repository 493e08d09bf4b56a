// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

func (r *report) measureChains(o options, n nodes) {
	r.measureShipped(o, n)
	for _, s := range scenarios() {
		r.measureChain(o, n, s)
	}
	r.addSizes(o.pluginFolders)
}

func (r *report) measureChain(o options, n nodes, s scenario) {
	sides, missing := o.usableSets(s)
	r.skip(missing...)
	entries, err := n.makeEntries(sides, s)
	if err != nil {
		r.fail(s.name, err)
		return
	}
	runRounds(entries, o.rounds)
	entries = slices.DeleteFunc(entries, func(e *contenderEntry) bool {
		if e.err != nil {
			r.fail(s.name+", "+e.side, e.err)
		}
		return e.err != nil
	})
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		r.addChain(s.name, verb, entries)
	}
	r.addProcesses(s.name, s.backend, entries)
}

func summary(samples []time.Duration) verbTimes {
	ms := func(p int) float64 { return percentile(samples, p).Seconds() * 1000 }
	return verbTimes{P50: ms(50), P95: ms(95)}
}

// addChain adds a row for the whole chain and, if it has several plugins, one for each.
func (r *report) addChain(name, verb string, entries []*contenderEntry) {
	row := chainRow{Chain: name, Verb: verb, Sides: map[string]verbTimes{}}
	var plugins []chainRow
	for _, e := range entries {
		times := summary(e.samples[verb].chain)
		times.CPU = summary(e.samples[verb].cpu).P50
		row.Sides[e.side] = times
		if e.side == sidePod {
			continue
		}
		for i, plugin := range e.samples[verb].order {
			if i == len(plugins) {
				plugins = append(plugins, chainRow{Chain: name, Verb: verb, Plugin: plugin, Sides: map[string]verbTimes{}})
			}
			plugins[i].Sides[e.side] = summary(e.samples[verb].processes[plugin])
		}
	}
	row.setVerdict(chainBar(name, verb))
	row.One = compareAtMost(row.Sides[sidePod].P50, row.Sides[sideReference].P50, podBar(name, verb))
	r.Chains = append(r.Chains, row)
	if len(plugins) < 2 {
		return
	}
	for i := range plugins {
		plugins[i].setVerdict(0)
	}
	r.Plugins = append(r.Plugins, plugins...)
}

// setVerdict compares Podlace's median, divided by that of the reference plugins, with the permitted ratio.
func (row *chainRow) setVerdict(bar float64) {
	row.target = compareAtMost(row.Sides[sideOurs].P50, row.Sides[sideReference].P50, bar)
}

func (r *report) addProcesses(name, backend string, entries []*contenderEntry) {
	if _, err := exec.LookPath("strace"); err != nil {
		r.skip(name + ", processes started: strace is not installed")
		return
	}
	rows := map[string]processRow{}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		rows[verb] = processRow{Chain: name, Verb: verb, Sides: map[string]startedProcesses{}}
	}
	for _, e := range entries {
		counts, err := e.countProcesses()
		if err != nil {
			r.fail(name+", counting processes", err)
			continue
		}
		for verb, count := range counts {
			rows[verb].Sides[e.side] = count
		}
	}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		row := rows[verb]
		if ours, ok := row.Sides[sideOurs]; ok && verb != verbCheck && backend != "iptables" {
			row.target = target{Bar: "0", Verdict: verdict(ours.Processes == 0 && len(ours.Programs) == 0)}
		}
		r.Processes = append(r.Processes, row)
	}
}

func (r *report) addSizes(f pluginFolders) {
	total := sizeRow{Plugin: "all five", Bytes: map[string]int64{}}
	for _, plugin := range []string{"bridge", "host-local", "loopback", "portmap", "bandwidth"} {
		row := sizeRow{Plugin: plugin, Bytes: map[string]int64{}}
		for side, folder := range map[string]string{sideOurs: f.plugins, sideReference: f.reference} {
			info, err := os.Stat(filepath.Join(folder, plugin))
			if err != nil {
				r.fail("size of "+plugin, err)
				continue
			}
			row.Bytes[side] = info.Size()
			total.Bytes[side] += info.Size()
		}
		r.Sizes = append(r.Sizes, row)
	}
	r.Sizes = append(r.Sizes, total)
	for i, row := range r.Sizes {
		r.Sizes[i].target = compareAtMost(float64(row.Bytes[sideOurs]), float64(row.Bytes[sideReference]), 0)
	}
}

func (r *report) measureDatapath(o options, n nodes) {
	sides, missing := o.usableSets(nftables())
	for _, reason := range missing {
		r.skip("throughput and first second, " + reason)
	}
	tracks, err := measurePaths(sides, n, time.Duration(o.seconds/datapathRepeats*float64(time.Second)))
	if err != nil {
		r.fail("throughput", err)
		return
	}
	for _, path := range []string{pathPod, pathHost} {
		r.addPath(path, tracks)
	}
}

func (r *report) addPath(path string, tracks []*flowTrack) {
	row := pathRow{Path: path, Gigabits: map[string]float64{}, CPU: map[string]float64{}}
	sides := map[string]*flowTrack{}
	for _, t := range tracks {
		switch {
		case t.path != path:
		case t.err != nil:
			r.fail("throughput, "+t.side, t.err)
		default:
			m := t.medianThroughput()
			row.Gigabits[t.side], row.CPU[t.side] = m.gigabits, m.cpuPerGbit
			sides[t.side] = t
		}
	}
	ours, reference := sides[sideOurs], sides[sideReference]
	if ours != nil && reference != nil {
		row.Ratio = ours.ratioOver(reference)
		row.Bar, row.Verdict = fmt.Sprintf(">= %.2f", datapathBar), verdict(row.Ratio >= datapathBar)
	}
	r.Datapath = append(r.Datapath, row)
}

func (r *report) measureFirstSecond(o options, n nodes) {
	rows := map[string]burstRow{}
	sides, _ := o.usableSets(nftables())
	for _, b := range measureFirstSecond(sides, n) {
		row, ok := rows[b.direction]
		if !ok {
			row = burstRow{Direction: b.direction, Megabits: map[string]float64{}}
		}
		if b.err != nil {
			r.fail("first second", b.err)
		} else {
			row.Megabits[b.side] = median(b.megabits)
		}
		if b.side == sideOurs && b.err == nil {
			row.Bar = fmt.Sprintf("<= %.0f Mbit", firstSecondBar)
			row.Verdict = verdict(row.Megabits[sideOurs] <= firstSecondBar)
		}
		rows[b.direction] = row
	}
	for _, direction := range slices.Sorted(maps.Keys(rows)) {
		r.FirstSecond = append(r.FirstSecond, rows[direction])
	}
}
