// SPDX-License-Identifier: Apache-2.0

//go:build podlace_fault

package fault

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// EnvFailAt names the variable with the number n of the change that fails, counted from 1. EnvTrace names a file to which each change is
// appended, one per line. EnvMoments does so for moments: changes and steps, counted together. EnvRunAt holds the number of a moment and a
// shell command. The process waits there until the command ends. The trace of moments contains the output of a failed command.
const (
	EnvFailAt  = "PODLACE_FAIL_AT"
	EnvTrace   = "PODLACE_FAULT_TRACE"
	EnvMoments = "PODLACE_FAULT_MOMENTS"
	EnvRunAt   = "PODLACE_RUN_AT"
)

var changes, moments atomic.Int64

// Point counts the change op, and returns an error if the environment selects this change.
func Point(op string) error {
	moment(op)
	n := changes.Add(1)
	trace(EnvTrace, n, op)
	if os.Getenv(EnvFailAt) == fmt.Sprint(n) {
		// Runtimes treat the end of this text as "already gone" in an error of DEL.
		return fmt.Errorf("injected fault at change %d (%s): not found: no such file or directory", n, op)
	}
	return nil
}

// Step counts a moment that is no change. It never fails. If the process waits for a child, the child is stopped too. The command gets its
// process ID as $CHILD.
func Step(what, object string, child ...int) { moment(what+" "+object, child...) }

func moment(op string, children ...int) {
	n := moments.Add(1)
	trace(EnvMoments, n, op)
	at, command, _ := strings.Cut(os.Getenv(EnvRunAt), " ")
	if at != fmt.Sprint(n) {
		return
	}
	for _, child := range children {
		_ = syscall.Kill(child, syscall.SIGSTOP) // at once: the child runs for milliseconds only
		defer func() { _ = syscall.Kill(child, syscall.SIGCONT) }()
		command = fmt.Sprintf("CHILD=%d; %s", child, command)
	}
	var shell sync.WaitGroup
	shell.Go(func() { // this thread may be in a pod's namespace
		if out, err := exec.Command("/bin/sh", "-ec", command).CombinedOutput(); err != nil {
			trace(EnvMoments, n, fmt.Sprintf("COMMAND FAILED: %v: %s", err, out))
		}
	})
	shell.Wait()
}

func trace(variable string, n int64, op string) {
	path := os.Getenv(variable)
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		fmt.Fprintf(f, "%d %s\n", n, op)
		f.Close()
	}
}
