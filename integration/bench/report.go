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

// A report contains all results of one run. The maps contain no entry for a plugin set that was not measured.
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

// verbTimes contains percentiles of the time of a verb in milliseconds.
type verbTimes struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
}

// A target contains the required value of a row and the verdict. Both fields are empty if the row has no required value.
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

// chainBar returns the maximum ratio of Podlace's time of a verb to the time of the reference plugins. 0 means no maximum.
func chainBar(chain, verb string) float64 {
	return map[string]float64{
		scenarioPlain + verbAdd: 0.6, scenarioPlain + verbDel: 0.9,
		scenarioNftables + verbAdd: 0.2, scenarioNftables + verbDel: 0.25,
		scenarioIptables + verbAdd: 0.7, scenarioIptables + verbDel: 0.7,
	}[chain+verb]
}

const (
	datapathBar    = 1.0
	datapathMargin = 0.05 // difference of two equal sides on a quiet machine
	firstSecondBar = 24.0 // Mbit

	met         = "met"
	missed      = "missed"
	withinNoise = "within noise"
)

func verdict(ok bool) string {
	if ok {
		return met
	}
	return missed
}

// datapathVerdict returns the verdict on a ratio of throughputs. A ratio slightly below the bar is accepted, because two equal plugin sets
// can also differ by this amount.
func datapathVerdict(ratio float64) string {
	if ratio < datapathBar && ratio >= datapathBar-datapathMargin {
		return withinNoise
	}
	return verdict(ratio >= datapathBar)
}

// compareAtMost compares the ratio value/base with the bar, which is the maximum ratio. A bar of 0 means no maximum.
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
