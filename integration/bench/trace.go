// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// started counts what a process started, itself not included.
type started struct {
	Processes int            `json:"processes"` // forks, also those that never execute a program
	Programs  map[string]int `json:"programs"`
}

func (s *started) add(other started) {
	s.Processes += other.Processes
	for name, n := range other.Programs {
		s.Programs[name] += n
	}
}

// traced runs an invocation under ptrace and counts every process and program below it. Nothing else sees them
// all: short-lived grandchildren are gone before /proc can be read.
func (inv invocation) traced() ([]byte, started, error) {
	files, err := inv.files()
	if err != nil {
		return nil, started{}, err
	}
	defer files.close()
	runtime.LockOSThread() // ptrace ties tracer and tracee to one thread
	defer runtime.UnlockOSThread()

	pid, err := syscall.ForkExec(inv.path, []string{inv.path}, &syscall.ProcAttr{
		Env: inv.env, Files: files.descriptors(), Sys: &syscall.SysProcAttr{Ptrace: true},
	})
	if err != nil {
		return nil, started{}, fmt.Errorf("start %s: %w", inv.path, err)
	}
	tracee := tracee{root: pid, count: started{Programs: map[string]int{}}}
	status, err := tracee.follow()
	if err != nil {
		return nil, started{}, fmt.Errorf("trace %s: %w", inv.path, err)
	}
	out, err := files.read()
	if err != nil {
		return nil, started{}, err
	}
	if status.ExitStatus() != 0 {
		return nil, started{}, fmt.Errorf("exit status %d: %s", status.ExitStatus(), out)
	}
	return out, tracee.count, nil
}

type tracee struct {
	root  int
	count started
}

const traceOptions = unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACECLONE |
	unix.PTRACE_O_TRACEEXEC | unix.PTRACE_O_EXITKILL

// follow resumes every stopped tracee until the first one has exited and no other is left.
func (t *tracee) follow() (unix.WaitStatus, error) {
	var status, last unix.WaitStatus
	if _, err := wait(t.root, &status); err != nil {
		return 0, fmt.Errorf("wait for the first stop: %w", err)
	}
	if err := unix.PtraceSetOptions(t.root, traceOptions); err != nil {
		return 0, fmt.Errorf("set ptrace options: %w", err)
	}
	if err := unix.PtraceCont(t.root, 0); err != nil {
		return 0, fmt.Errorf("continue: %w", err)
	}
	for {
		pid, err := wait(-1, &status)
		if errors.Is(err, unix.ECHILD) {
			return last, nil
		}
		if err != nil {
			return 0, fmt.Errorf("wait: %w", err)
		}
		if status.Stopped() {
			t.resume(pid, status)
		} else if pid == t.root {
			last = status
		}
	}
}

// wait reaps children and tracees of this thread alone.
func wait(pid int, status *unix.WaitStatus) (int, error) {
	for {
		got, err := unix.Wait4(pid, status, unix.WALL|unix.WNOTHREAD, nil)
		if !errors.Is(err, unix.EINTR) {
			return got, err
		}
	}
}

// resume counts what a stop tells and lets the tracee go on. A tracee that was killed meanwhile is reaped later,
// so a failing continue is no error.
func (t *tracee) resume(pid int, status unix.WaitStatus) {
	signal := int(status.StopSignal())
	switch event := status.TrapCause(); {
	case event == unix.PTRACE_EVENT_EXEC:
		t.count.Programs[programName(pid)]++
		signal = 0
	case event == unix.PTRACE_EVENT_FORK || event == unix.PTRACE_EVENT_VFORK:
		t.count.Processes++
		signal = 0
	case event > 0, signal == int(unix.SIGSTOP): // a thread; the birth stop of a new tracee
		signal = 0
	}
	_ = unix.PtraceCont(pid, signal)
}

// programName reads the name a stopped process was executed as; the tracee cannot vanish meanwhile.
func programName(pid int) string {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return "unknown"
	}
	name, _, _ := bytes.Cut(line, []byte{0})
	return filepath.Base(string(name))
}

// streams are files in memory instead of pipes, since the tracing thread cannot serve a pipe as well.
type streams struct{ in, out *os.File }

func (inv invocation) files() (streams, error) {
	in, err := memoryFile("stdin")
	if err != nil {
		return streams{}, err
	}
	out, err := memoryFile("stdout")
	if err != nil {
		in.Close()
		return streams{}, err
	}
	s := streams{in, out}
	if _, err := in.WriteAt(inv.stdin, 0); err != nil {
		s.close()
		return streams{}, fmt.Errorf("write stdin: %w", err)
	}
	return s, nil
}

func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (s streams) descriptors() []uintptr {
	return []uintptr{s.in.Fd(), s.out.Fd(), uintptr(syscall.Stderr)}
}

func (s streams) read() ([]byte, error) {
	out, err := io.ReadAll(io.NewSectionReader(s.out, 0, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("read stdout: %w", err)
	}
	return out, nil
}

func (s streams) close() {
	s.in.Close()
	s.out.Close()
}
