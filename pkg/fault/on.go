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

// EnvFailAt is the environment variable that selects the change that must fail: with the value n, the nth change of the process fails. The
// first change has the number 1. EnvTrace is an environment variable with the name of a file. The process appends each change to this file
// as a line. EnvMoments is an environment variable with the name of another file. The process appends each change and each call of Step()
// to the file of EnvMoments as a line. EnvRunAt is an environment variable that makes the process run a shell command. The variable
// contains the number of a line in the file of EnvMoments, and the command. When the process has written that line, it runs the shell
// command and waits until the command ends. If the shell command fails, its output is written to the file of EnvMoments.
const (
	EnvFailAt  = "PODLACE_FAIL_AT"
	EnvTrace   = "PODLACE_FAULT_TRACE"
	EnvMoments = "PODLACE_FAULT_MOMENTS"
	EnvRunAt   = "PODLACE_RUN_AT"
)

var changes, moments atomic.Int64

// Point counts one change. The argument op describes the change. Point returns an error if the environment variable EnvFailAt selects the
// change.
func Point(op string) error {
	moment(op)
	n := changes.Add(1)
	trace(EnvTrace, n, op)
	if os.Getenv(EnvFailAt) == fmt.Sprint(n) {
		// Container runtimes treat the text "no such file or directory" in an error of DEL as "already gone". The injected error ends with this
		// text, so that tests detect a DEL that passes the text to the runtime.
		return fmt.Errorf("injected fault at change %d (%s): not found: no such file or directory", n, op)
	}
	return nil
}

// Step marks a place in the code, between changes, at which EnvRunAt can run a shell command. If the process has a running child process,
// Step stops the child during the shell command. The shell command gets the process ID of the child in the environment variable CHILD.
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
