// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"
)

// A step is one test in the script, and one row of the report.
type step struct {
	name string
	want string
	// What the step needs and a machine may lack: "ipv6", "br_netfilter", or the type of a plugin whose kernel feature may be missing.
	needs []string
	run   func(context.Context, *lab) outcome
}

// An outcome is the result and measured value of a step.
type outcome struct {
	verdict  Verdict
	measured string
	value    float64
	unit     string
	note     string
}

func (s step) row(ctx context.Context, l *lab) Row {
	row := Row{Step: s.name, Wanted: s.want}
	for _, need := range s.needs {
		if reason, lacking := l.lacks[need]; lacking {
			row.Result, row.Measured, row.Note = Skip, "-", reason
			return row
		}
	}
	o := s.run(ctx, l)
	row.Result, row.Measured, row.Value, row.Unit, row.Note = o.verdict, o.measured, o.value, o.unit, o.note
	return row
}

func (o outcome) withNote(format string, args ...any) outcome {
	note := fmt.Sprintf(format, args...)
	if o.note != "" {
		note = o.note + "; " + note
	}
	o.note = note
	return o
}

// failed returns the outcome of a step that ended with an error.
func failed(err error) outcome {
	return outcome{verdict: Miss, measured: "failed", note: err.Error()}
}

// verdictFor returns OK if good, and Miss otherwise.
func verdictFor(good bool, measured string) outcome {
	if good {
		return outcome{verdict: OK, measured: measured}
	}
	return outcome{verdict: Miss, measured: measured}
}

func milliseconds(took time.Duration) outcome {
	ms := float64(took) / float64(time.Millisecond)
	return outcome{verdict: Info, measured: fmt.Sprintf("%.1f ms", ms), value: ms, unit: "ms"}
}

// timed returns the outcome of a step that succeeded. Taking long is no failure, because it depends more on the machine than on the
// plugins.
func timed(took, usual time.Duration) outcome {
	o := milliseconds(took)
	o.verdict = OK
	if took > usual {
		o.note = fmt.Sprintf("slow machine: usually below %d ms", usual.Milliseconds())
	}
	return o
}

func megabits(bitsPerSecond, low, high float64) outcome {
	m := bitsPerSecond / 1e6
	o := verdictFor(bitsPerSecond >= low && bitsPerSecond <= high, fmt.Sprintf("%.1f Mbit/s", m))
	o.value, o.unit = m, "Mbit/s"
	return o
}
