// SPDX-License-Identifier: Apache-2.0

//go:build !podlace_fault

package fault

import (
	"bytes"
	"io"
	"log/slog"
	"regexp"
	"testing"
	"time"
)

// logTo makes the default logger write to w, at the given level, until the test ends.
func logTo(t *testing.T, w io.Writer, level slog.Level) {
	t.Helper()
	before := slog.Default()
	t.Cleanup(func() { slog.SetDefault(before) })
	slog.SetDefault(slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})))
}

// While the debug log is off, Phase does not read the clock, allocates no memory and logs nothing.
func TestPhaseOff(t *testing.T) {
	var log bytes.Buffer
	logTo(t, &log, slog.LevelInfo)
	began := time.Now()
	if n := testing.AllocsPerRun(100, func() {
		Phase("lock")()
		Since("setup", began)
		_ = Change("x", func() error { return nil })
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if now := clock(); !now.IsZero() || log.Len() > 0 {
		t.Errorf("time %v, log %q", now, log.String())
	}
}

// The debug log contains the start time and the duration of each phase and change, in microseconds.
func TestPhaseOn(t *testing.T) {
	var log bytes.Buffer
	logTo(t, &log, slog.LevelDebug)
	end := Phase("lock")
	time.Sleep(2 * time.Millisecond)
	end()
	Since("setup", time.UnixMicro(7))
	if err := Change("link add x", func() error { return io.EOF }); err == nil {
		t.Error("the change succeeded")
	}
	for _, want := range []string{`msg=phase at=\d{16} took=\d{4,} name=lock\n`, `msg=phase at=7 took=\d{16} name=setup\n`,
		`msg=change at=\d{16} took=\d+ op="link add x" error=EOF\n`} {
		if !regexp.MustCompile(want).MatchString(log.String()) {
			t.Errorf("no %s in %s", want, log.String())
		}
	}
}
