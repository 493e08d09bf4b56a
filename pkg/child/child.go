// SPDX-License-Identifier: Apache-2.0

// Package child runs the external programs that a CNI operation needs, such as an external IPAM plugin or iptables. After a timeout, a
// runtime kills only the plugin's process. A child that ran on could make changes after the next DEL, which no later operation would
// remove.
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

// ErrTimeout means that a program was killed, together with its children, because it did not end in time.
var ErrTimeout = errors.New("no answer in time")

// maxOutput is the maximum size of a program's stored output in bytes.
const maxOutput = 16 << 20

// pipeTimeout limits the wait for the output of a program that has ended, because a daemon that it started may keep the pipes open. On a
// busy machine, even the output that is already there may be read late.
const pipeTimeout = 10 * time.Second

// Buffer stores the output of a program, up to 16 MiB.
type Buffer struct{ bytes.Buffer }

// Write returns an error if the buffer is full, so a program with too much output ends with SIGPIPE.
func (b *Buffer) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxOutput {
		return 0, errors.New("too much output")
	}
	return b.Buffer.Write(p)
}

// Run runs cmd and kills it after the timeout. If the calling process dies, the kernel kills the program. It inherits the lock file hold,
// so the lock stays held until the program has ended.
func Run(cmd *exec.Cmd, timeout time.Duration, hold *os.File) error {
	// The kernel kills the program when the thread that started it ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = pipeTimeout
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
