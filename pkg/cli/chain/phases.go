// SPDX-License-Identifier: Apache-2.0

package chain

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Change is one change that a plugin made to the system.
type Change struct {
	What string        `json:"what"` // includes the error if the change failed
	At   time.Duration `json:"at"`   // nanoseconds from the start of the process to the start of the change
	Took time.Duration `json:"took"` // nanoseconds
}

// Phase is the time that a plugin spent on one kind of work, such as waiting for locks. Phases do not overlap, and their sum is the
// plugin's time.
type Phase struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"` // nanoseconds
}

// Names of phases. Package fault logs the beginning and the end of most, and phasesOf computes the others.
const (
	phaseStart   = "start"   // from the start of the process to the plugin's code
	phaseSetup   = "setup"   // reads environment and configuration, opens the namespace
	phaseLock    = "lock"    // waits for locks
	phaseIPAM    = "ipam"    // the IPAM plugin, without its locks
	phaseChanges = "changes" // changes of the kernel and of files
	phaseRecord  = "record"  // writes the record of the attachment
	phaseRest    = "rest"    // reads the state of the kernel, and computes
	phaseExit    = "exit"    // from the result to the end of the process
)

// phaseOrder returns the phases in the order in which trace prints them.
func phaseOrder() []string {
	return []string{phaseStart, phaseSetup, phaseLock, phaseIPAM, phaseChanges, phaseRecord, phaseRest, phaseExit}
}

// span is a logged interval of a plugin's run, measured from its start.
type span struct {
	name       string
	begin, end time.Duration
}

var logged = regexp.MustCompile(`msg=(change|phase) .*?\bat=(\d+) took=(\d+) (?:op|name)=("(?:[^"\\]|\\.)*"|\S+)(?: error=(.*))?$`)

// readLog returns the phases and changes in a plugin's debug log. Without the phase "setup" the plugin is not Podlace's, and there are no
// phases.
func readLog(log string, began, ended time.Time) (phases []Phase, changes []Change) {
	var spans []span
	for line := range strings.Lines(log) {
		m := logged.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		s := span{name: unquoted(m[4]), begin: time.UnixMicro(number(m[2])).Sub(began)}
		s.end = s.begin + time.Duration(number(m[3]))*time.Microsecond
		if m[1] == "change" {
			changes = append(changes, Change{What: withError(s.name, unquoted(m[5])), At: s.begin, Took: s.end - s.begin})
			s.name = phaseChanges
		}
		spans = append(spans, s)
	}
	return phasesOf(spans, ended.Sub(began)), slices.Clip(changes)
}

func withError(op, failure string) string {
	if failure != "<nil>" {
		op += ": " + failure
	}
	return op
}

func number(digits string) int64 {
	n, _ := strconv.ParseInt(digits, 10, 64) // the expression matches digits only
	return n
}

func unquoted(text string) string {
	if plain, err := strconv.Unquote(text); err == nil {
		return plain
	}
	return text
}

// phasesOf divides a plugin's time among the phases. Time in nested spans belongs to the innermost.
func phasesOf(spans []span, took time.Duration) (phases []Phase) {
	setup := slices.IndexFunc(spans, func(s span) bool { return s.name == phaseSetup })
	if setup < 0 {
		return nil
	}
	spans = append([]span{{phaseStart, 0, spans[setup].begin}}, spans...)
	for i, s := range spans {
		if s.name == "end" {
			spans[i] = span{phaseExit, s.begin, took}
		}
	}
	times := []time.Duration{0, took}
	for _, s := range spans {
		times = append(times, min(max(s.begin, 0), took), min(max(s.end, 0), took))
	}
	slices.Sort(times)
	sums := map[string]time.Duration{}
	for i, from := range times[:len(times)-1] {
		sums[innermost(spans, from)] += times[i+1] - from
	}
	for _, name := range phaseOrder() {
		if sums[name] > 0 {
			phases = append(phases, Phase{name, sums[name]})
		}
	}
	return phases
}

// innermost returns the name of the span with the given time that began last.
func innermost(spans []span, at time.Duration) string {
	inner := span{name: phaseRest, begin: -1}
	for _, s := range spans {
		if s.begin <= at && at < s.end && s.begin >= inner.begin {
			inner = s
		}
	}
	return inner.name
}
