// SPDX-License-Identifier: Apache-2.0

// Package fault is the common path of every system change. Change makes one change: it names the change in the error and in the debug log,
// and retries it if a signal interrupted it. The state store only calls Point, because file errors already name the operation and the file.
// Step marks further moments at which a killed process leaves a different state: between two system calls of a change, and after the last
// change.
//
// Production builds compile Point and Step to nothing. Binaries with the build tag podlace_fault fail the nth change of the process, so
// that a test can fail every change of every verb once. They can also run a command at the nth moment, which kills the process, sends a
// signal, or changes the node.
package fault

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"
)

// maxRetries limits the retries of an interrupted request.
const maxRetries = 30

// Change makes one system change. op names it in the words of an admin's tools, such as ip(8), and begins the text of the error.
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

// clock returns the time if the debug log is on. Without the debug log it returns the zero time and asks for no time.
func clock() (now time.Time) {
	if slog.Default().Enabled(context.Background(), slog.LevelDebug) {
		now = time.Now()
	}
	return now
}

// Phase begins a part of a verb other than a change, such as a wait for a lock. The returned function ends the part, and writes its time, in
// microseconds, to the debug log. Without the debug log it does nothing.
func Phase(name string) (end func()) {
	began := clock()
	if began.IsZero() {
		return func() {}
	}
	return func() { phase(name, began) }
}

// Since writes a part of a verb that ends now to the debug log. Without the debug log it does nothing.
func Since(name string, began time.Time) {
	if slog.Default().Enabled(context.Background(), slog.LevelDebug) {
		phase(name, began)
	}
}

func phase(name string, began time.Time) {
	slog.Debug("phase", "at", began.UnixMicro(), "took", time.Since(began).Microseconds(), "name", name)
}

// Retry repeats f if a signal interrupted it, or if it returns one of the errors in interrupted.
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

// Ignore returns nil if err is one of the others, and err otherwise.
func Ignore(err error, others ...error) error {
	for _, e := range others {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
