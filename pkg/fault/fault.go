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
	"errors"
	"fmt"
	"log/slog"
	"syscall"
)

// maxRetries limits the retries of an interrupted request.
const maxRetries = 30

// Change makes one system change. op names it in the words of an admin's tools, such as ip(8), and begins the text of the error.
func Change(op string, f func() error) error {
	err := Point(op)
	if err == nil {
		err = Retry(f)
	}
	slog.Debug("change", "op", op, "error", err)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
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
