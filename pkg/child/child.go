// SPDX-License-Identifier: Apache-2.0

// Package child runs external programs that a verb needs: an IPAM plugin or iptables. A runtime that times out kills only the plugin. An
// external program that outlived it could make changes after the following DEL, which no later verb would remove.
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

// ErrTimeout means that a program did not end in time, and was killed with its children.
var ErrTimeout = errors.New("no answer in time")

// maxOutput limits the stored output of a program.
const maxOutput = 16 << 20

// Buffer stores the output of a program, at most 16 MiB.
type Buffer struct{ bytes.Buffer }

// Write fails if the buffer is full; the program then ends by SIGPIPE.
func (b *Buffer) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxOutput {
		return 0, errors.New("too much output")
	}
	return b.Buffer.Write(p)
}

// Run runs cmd with a timeout. The program inherits hold, a lock file: if the program survives this process, the next process that takes
// the lock waits for its end. The kernel kills the program if this process dies.
func Run(cmd *exec.Cmd, timeout time.Duration, hold *os.File) error {
	// The signal at the parent's death depends on the thread that starts the program.
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
