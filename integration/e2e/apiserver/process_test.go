// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// process is a program that runs until the end of the test at the latest.
type process struct {
	name  string
	cmd   *exec.Cmd
	ended chan struct{}
}

// start runs a program. It is killed when the test program ends, in whatever way.
func start(t *testing.T, log string, cmd *exec.Cmd) *process {
	t.Helper()
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = out, out, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &process{name: log, cmd: cmd, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		defer out.Close()
		runtime.LockOSThread() // whose end is the parent's death
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
		close(p.ended)
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		if text, err := os.ReadFile(log); t.Failed() && err == nil {
			t.Logf("the end of %s:\n%s", log, text[max(0, len(text)-4000):])
		}
	})
	return p
}

// signal sends a signal and waits until the process has ended. It is a no-op if the process has ended before.
func (p *process) signal(s os.Signal) {
	_ = p.cmd.Process.Signal(s)
	<-p.ended
}

// alive reports whether the process still runs.
func (p *process) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// peak returns the most resident memory that the process had, in bytes.
func (p *process) peak() (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	kib, err := strconv.ParseInt(strings.Fields(rest + " ?")[0], 10, 64)
	return kib << 10, err
}

// cpu returns the time that the process has computed.
func (p *process) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])) // from state on, the third of proc(5)
	user, err := strconv.ParseInt(fields[11], 10, 64)
	if err != nil {
		return 0, err
	}
	system, err := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, err // USER_HZ is 100 on every architecture
}

// load returns the machine's load averages.
func load() string {
	text, _ := os.ReadFile("/proc/loadavg")
	return strings.Join(strings.Fields(string(text))[:2], " ")
}
