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

// EnvFailAt is an environment variable with a number n: the nth change of the process fails. The first change has the number 1. EnvTrace is
// an environment variable with the name of a file. Each change is appended to this file as a line. EnvMoments is an environment variable
// with the name of another file. Each moment is appended to that file as a line. Moments are changes and steps, which are counted together.
// EnvRunAt is an environment variable with the number of a moment and a shell command. At that moment, the process runs the command and
// waits until the command ends. If the command fails, its output is written to the file of EnvMoments.
const (
	EnvFailAt  = "PODLACE_FAIL_AT"
	EnvTrace   = "PODLACE_FAULT_TRACE"
	EnvMoments = "PODLACE_FAULT_MOMENTS"
	EnvRunAt   = "PODLACE_RUN_AT"
)

var changes, moments atomic.Int64

// Point counts one change. The argument is a description of the change. Point returns an error if EnvFailAt selects this change.
func Point(op string) error {
	moment(op)
	n := changes.Add(1)
	trace(EnvTrace, n, op)
	if os.Getenv(EnvFailAt) == fmt.Sprint(n) {
		// If an error of DEL ends with this text, runtimes treat the error as "already gone".
		return fmt.Errorf("injected fault at change %d (%s): not found: no such file or directory", n, op)
	}
	return nil
}

// Step counts a moment that is not a change. Step never returns an error. If the process has a running child process, the child is stopped
// during the command. The shell command finds the process ID of the child in the variable CHILD.
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
