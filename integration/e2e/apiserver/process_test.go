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

// testProcess is a program that ends with the test or earlier.
type testProcess struct {
	name  string
	cmd   *exec.Cmd
	ended chan struct{}
}

// startProcess runs a program. If the test program ends for any reason, the kernel kills the started program.
func startProcess(t *testing.T, log string, cmd *exec.Cmd) *testProcess {
	t.Helper()
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = out, out, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &testProcess{name: log, cmd: cmd, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		defer out.Close()
		runtime.LockOSThread() // the kernel regards the end of this thread as the parent's death
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
		p.signalWait(syscall.SIGKILL)
		if text, err := os.ReadFile(log); t.Failed() && err == nil {
			t.Logf("the end of %s:\n%s", log, text[max(0, len(text)-4000):])
		}
	})
	return p
}

// signalWait sends a signal to the process and waits for its end. It is a no-op if the process has ended.
func (p *testProcess) signalWait(s os.Signal) {
	_ = p.cmd.Process.Signal(s)
	<-p.ended
}

// isAlive reports whether the process still runs.
func (p *testProcess) isAlive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// peakMemory returns the peak of the process's resident memory, in bytes.
func (p *testProcess) peakMemory() (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	kib, err := strconv.ParseInt(strings.Fields(rest + " ?")[0], 10, 64)
	return kib << 10, err
}

// cpuTime returns the CPU time that the process has used.
func (p *testProcess) cpuTime() (time.Duration, error) {
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

// loadAverages returns the machine's load averages.
func loadAverages() string {
	text, _ := os.ReadFile("/proc/loadavg")
	return strings.Join(strings.Fields(string(text))[:2], " ")
}
