// SPDX-License-Identifier: Apache-2.0

//go:build podlace_fault

package fault

import (
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
)

// EnvFailAt names the variable that holds n, the change to fail, counted from 1; EnvKillAt the one before which the process dies. EnvTrace names a file to which each change is
// appended, one per line, so that a test learns how many there are.
const (
	EnvFailAt = "PODLACE_FAIL_AT"
	EnvKillAt = "PODLACE_KILL_AT"
	EnvTrace  = "PODLACE_FAULT_TRACE"
)

var count atomic.Int64

// Point counts the change op and returns an error when it is the one that the environment asks to fail.
func Point(op string) error {
	n := count.Add(1)
	if path := os.Getenv(EnvTrace); path != "" {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			fmt.Fprintf(f, "%d %s\n", n, op)
			f.Close()
		}
	}
	if os.Getenv(EnvKillAt) == strconv.FormatInt(n, 10) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // another thread takes the signal
	}
	if at, err := strconv.ParseInt(os.Getenv(EnvFailAt), 10, 64); err == nil && at == n {
		// The end is what runtimes take for "already gone" when DEL says it.
		return fmt.Errorf("injected fault at change %d (%s): not found: no such file or directory", n, op)
	}
	return nil
}
