// SPDX-License-Identifier: Apache-2.0

// Package fault contains the functions through which Podlace changes the system. Change() makes one change. If a signal interrupts the
// change, Change() repeats the change. The error and the debug log of a change contain its description. Change() adds the description to an
// error. Package store calls Point instead of Change(), because errors of file operations already contain the operation and the file. A
// test may kill the process at each change and at each call of Step(). The code calls Step() between two system calls of a change, and
// after the last change.
//
// In production builds, Point and Step do nothing. In binaries with the build tag podlace_fault, a test can make any single change of the
// process fail. Tests use the build tag podlace_fault to make each change of each CNI command fail once. Binaries with the build tag
// podlace_fault can also run a shell command at a selected change or call of Step(). The shell command kills the process, sends a signal,
// or changes the node.
package fault

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"
)

// maxRetries is the maximum number of times that an interrupted system call is repeated.
const maxRetries = 30

// Change makes one change of the system by calling f(). The argument op describes the change in the syntax of an admin's tool, such as
// ip(8). The text of an error begins with op.
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

// clock() returns the current time if the debug log is on. If the debug log is off, clock() returns the zero time without reading the
// system clock.
func clock() (now time.Time) {
	if slog.Default().Enabled(context.Background(), slog.LevelDebug) {
		now = time.Now()
	}
	return now
}

// Phase measures how long a CNI command spends in a part without changes, for example in a wait for a lock. The measurement ends when the
// caller calls the returned function. The returned function writes the duration in microseconds to the debug log. If the debug log is off,
// Phase does nothing.
func Phase(name string) (end func()) {
	began := clock()
	if began.IsZero() {
		return func() {}
	}
	return func() { phase(name, began) }
}

// Since logs the time from "began" until now as the duration of a part of a CNI command. If the debug log is off, Since does nothing.
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

// Ignore returns nil if err is one of the errors in the remaining arguments. Otherwise, Ignore returns err unchanged.
func Ignore(err error, others ...error) error {
	for _, e := range others {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
