// SPDX-License-Identifier: Apache-2.0

// Package child runs the programs of others that a verb cannot do without: a foreign IPAM plugin, iptables. A runtime that loses patience
// kills the plugin alone; what such a program did after that, and after the DEL that follows, nobody would ever clean up.
package child

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/fault"
)

// ErrTimeout says that a program did not end in time, and was killed with all that it started.
var ErrTimeout = errors.New("no answer in time")

// maxOutput bounds what is kept of a program's output.
const maxOutput = 16 << 20

// Buffer keeps the output of a program, at most 16 MiB.
type Buffer struct{ bytes.Buffer }

// Write fails when the buffer is full, which ends the program by SIGPIPE.
func (b *Buffer) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxOutput {
		return 0, errors.New("too much output")
	}
	return b.Buffer.Write(p)
}

// Run runs cmd for at most the timeout. The program inherits hold, the file of a lock: even when it survives this process, whoever takes
// the lock waits for its end. It is killed when this process dies.
func Run(cmd *exec.Cmd, timeout time.Duration, hold *os.File) error {
	// The signal at the death of the parent is bound to the thread that starts the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // a grandchild may keep the pipes open
	if hold != nil {
		cmd.ExtraFiles = []*os.File{hold}
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	fault.Step("wait for", cmd.Path, cmd.Process.Pid)
	late := make(chan struct{})
	timer := time.AfterFunc(timeout, func() {
		close(late)
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	})
	err := cmd.Wait()
	if !timer.Stop() {
		<-late
		return ErrTimeout
	}
	return err
}
