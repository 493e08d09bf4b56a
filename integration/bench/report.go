// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// report contains all results of one run. Plugin sets without a measurement have no entry in the maps.
type report struct {
	Kernel      string       `json:"kernel"`
	CPUs        int          `json:"cpus"`
	Load        string       `json:"load"` // load average of the last minute
	Rounds      int          `json:"rounds"`
	Scale       float64      `json:"scale"`
	Seconds     float64      `json:"seconds"`
	Chains      []chainRow   `json:"chains"`
	Plugins     []chainRow   `json:"plugins"`
	Processes   []processRow `json:"processes"`
	Sizes       []sizeRow    `json:"sizes"`
	Datapath    []pathRow    `json:"datapath"`
	FirstSecond []burstRow   `json:"firstSecond"`
	Growth      []figureRow  `json:"growth"`
	Loads       []figureRow  `json:"loads"`
	Limits      []limitRow   `json:"limits"`
	Skipped     []string     `json:"skipped"`
	Failed      []string     `json:"failed"`
}

// verbTimes are percentiles of a verb's duration and the median of its processor time, in milliseconds.
type verbTimes struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	CPU float64 `json:"cpu,omitempty"`
}

// target is the required value of a row, and "met" or "missed". Both are empty if nothing is required.
type target struct {
	Ratio   float64 `json:"ratio,omitempty"`
	Bar     string  `json:"bar,omitempty"`
	Verdict string  `json:"verdict,omitempty"`
}

type chainRow struct {
	Chain  string               `json:"chain"`
	Verb   string               `json:"verb"`
	Plugin string               `json:"plugin,omitempty"`
	Sides  map[string]verbTimes `json:"sides"`
	One    target               `json:"podlacePod"` // of podlace-pod
	target
}

type processRow struct {
	Chain string                      `json:"chain"`
	Verb  string                      `json:"verb"`
	Sides map[string]startedProcesses `json:"sides"`
	target
}

type sizeRow struct {
	Plugin string           `json:"plugin"`
	Bytes  map[string]int64 `json:"bytes"`
	target
}

type pathRow struct {
	Path     string             `json:"path"`
	Gigabits map[string]float64 `json:"gigabitsPerSecond"`
	CPU      map[string]float64 `json:"cpuSecondsPerGigabit"`
	target
}

type burstRow struct {
	Direction string             `json:"direction"`
	Megabits  map[string]float64 `json:"megabits"`
	target
}

func newReport(o options) *report {
	var name unix.Utsname
	_ = unix.Uname(&name) // the name is informative only
	load, _ := os.ReadFile("/proc/loadavg")
	minute, _, _ := strings.Cut(string(load), " ")
	return &report{
		Kernel: unix.ByteSliceToString(name.Release[:]), CPUs: runtime.NumCPU(), Load: minute, Rounds: o.rounds, Scale: o.scale,
		Skipped: []string{}, Failed: []string{},
	}
}

func (r *report) skip(reasons ...string) { r.Skipped = append(r.Skipped, reasons...) }

func (r *report) fail(what string, err error) {
	r.Failed = append(r.Failed, what+": "+strings.Join(strings.Fields(err.Error()), " "))
}

// chainBar returns the permitted ratio of Podlace's time to that of the reference plugins, or 0 for none. The ratios hold where an empty Go
// program takes 1 to 8 ms, with one to three RCU grace periods in DEL.
func chainBar(chain, verb string) float64 {
	return map[string]float64{
		podLimits + verbAdd: 0.2, podLimits + verbDel: 0.3,
		scenarioIptables + verbAdd: 0.7, scenarioIptables + verbDel: 0.7,
	}[chain+verb]
}

// podBar is chainBar for podlace-pod.
func podBar(chain, verb string) float64 {
	return map[string]float64{
		podPlain + verbAdd: 0.15, podPlain + verbDel: 0.2,
		podMapped + verbAdd: 0.1, podMapped + verbDel: 0.15,
		podLimits + verbAdd: 0.1, podLimits + verbDel: 0.2,
	}[chain+verb]
}

const (
	datapathBar    = 0.9  // both sides have the same path through the kernel, and two measurements of one side differ by up to 7 %
	firstSecondBar = 24.0 // Mbit

	met    = "met"
	missed = "missed"
)

func verdict(ok bool) string {
	if ok {
		return met
	}
	return missed
}

// compareAtMost compares value/base with the permitted maximum. A bar of 0 means none.
func compareAtMost(value, base, bar float64) target {
	if value == 0 || base == 0 {
		return target{}
	}
	t := target{Ratio: value / base}
	if bar > 0 {
		t.Bar, t.Verdict = fmt.Sprintf("<= %.2f", bar), verdict(t.Ratio <= bar)
	}
	return t
}

func (r *report) write(out io.Writer, format string) error {
	if format == "json" {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(r); err != nil {
			return fmt.Errorf("write report: %w", err)
		}
		return nil
	}
	if _, err := io.WriteString(out, r.markdown()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
