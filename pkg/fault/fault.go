// SPDX-License-Identifier: Apache-2.0

// Package fault contains the functions through which Podlace changes the system. Change makes one change, repeats it if a signal interrupts
// it, and describes it in its error and the debug log. Package store calls Point instead, because its errors already name the operation and
// the file. Step stands between two system calls of a change, and after the last change.
//
// In production builds, Point and Step do nothing. With the build tag podlace_fault, a test can make any single change fail, or run a shell
// command at a change or Step, which kills the process, sends a signal or changes the node.
package fault

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"
)

// maxRetries limits the repetitions of an interrupted system call.
const maxRetries = 30

// Change makes one change of the system by calling f. op describes it in the syntax of an admin's tool, such as ip(8), and begins the text
// of an error.
func Change(op string, f func() error) error {
	began := clock()
	err := Point(op)
	if err == nil {
		err = Retry(f)
	}
	if !began.IsZero() {
		slog.Debug("change", "at", began.UnixMicro(), "took", time.Since(began).Microseconds(), "op", op, "error", err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// clock returns the current time, or the zero time, without reading the system clock, if the debug log is off.
func clock() (now time.Time) {
	if slog.Default().Enabled(context.Background(), slog.LevelDebug) {
		now = time.Now()
	}
	return now
}

// Phase measures how long a CNI command spends in a part without changes, for example in a wait for a lock. end logs the duration in
// microseconds. It is a no-op if the debug log is off.
func Phase(name string) (end func()) {
	began := clock()
	if began.IsZero() {
		return func() {}
	}
	return func() { phase(name, began) }
}

// Since logs the time since began as the duration of a part of a CNI command. It is a no-op if the debug log is off.
func Since(name string, began time.Time) {
	if slog.Default().Enabled(context.Background(), slog.LevelDebug) {
		phase(name, began)
	}
}

func phase(name string, began time.Time) {
	slog.Debug("phase", "at", began.UnixMicro(), "took", time.Since(began).Microseconds(), "name", name)
}

// Retry calls f again if a signal interrupted f, or if f returns one of the given errors.
func Retry(f func() error, interrupted ...error) error {
	var err error
	for range maxRetries {
		err = f()
		if err == nil || Ignore(err, append(interrupted, syscall.EINTR)...) != nil {
			return err
		}
	}
	return err
}

// Ignore returns err, or nil if errors.Is finds one of the other errors in it.
func Ignore(err error, others ...error) error {
	for _, e := range others {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
