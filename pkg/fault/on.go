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

// Environment variables. EnvFailAt is the number of the change that must fail, from 1. EnvTrace names a file to which the process appends a
// line for each change, and EnvMoments one for each change and call of Step. EnvRunAt is the number of a line in the latter, and a shell
// command: after this line, the process runs it, waits for its end, and appends the output to the same file if it fails.
const (
	EnvFailAt  = "PODLACE_FAIL_AT"
	EnvTrace   = "PODLACE_FAULT_TRACE"
	EnvMoments = "PODLACE_FAULT_MOMENTS"
	EnvRunAt   = "PODLACE_RUN_AT"
)

var changes, moments atomic.Int64

// Point counts the change that op describes, and returns an error if EnvFailAt selects it.
func Point(op string) error {
	moment(op)
	n := changes.Add(1)
	trace(EnvTrace, n, op)
	if os.Getenv(EnvFailAt) == fmt.Sprint(n) {
		// Container runtimes take "no such file or directory" in an error of DEL for "already gone". With this text, tests detect a DEL that
		// passes it to the runtime.
		return fmt.Errorf("injected fault at change %d (%s): not found: no such file or directory", n, op)
	}
	return nil
}

// Step marks a place in the code, between changes, at which EnvRunAt can run a shell command. A running child process is stopped meanwhile,
// and the command gets its process ID in CHILD.
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
