// SPDX-License-Identifier: Apache-2.0

// Package fault is the one path of every change of the system. Change makes one change: it names the change in the error and in the debug
// log, and retries it when a signal interrupted it. The state store calls Point alone, because errors of files already name the operation
// and the file. Step marks further moments at which a killed process leaves another state: between two system calls of one change, and
// after the last change. Production builds compile Point and Step to nothing. Binaries built with the tag podlace_fault fail the nth change
// of the process, so that a test can fail every change of every verb once. They also run a command at the nth moment, which kills the
// process, sends a signal, or changes the node.
package fault

import (
	"errors"
	"fmt"
	"log/slog"
	"syscall"
)

// maxRetries bounds how often an interrupted request is sent again.
const maxRetries = 30

// Change makes one change of the system. op names it in the words of the admin's tools, such as ip(8), and begins the text of the error.
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

// Retry repeats f when a signal interrupted it, or when it returns another error that says the same.
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

// Ignore returns nil when err is one of the others.
func Ignore(err error, others ...error) error {
	for _, e := range others {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
