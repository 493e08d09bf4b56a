// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const options = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK |
	unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACEEXEC | unix.PTRACE_O_EXITKILL

// syscallStop is how PTRACE_O_TRACESYSGOOD marks a stop at a system call.
const syscallStop = unix.SIGTRAP | 0x80

// tracer follows one process tree. All its methods run on the one thread that
// started the tree, as ptrace demands.
type tracer struct {
	at     int
	policy string
	signal unix.Signal
	run    string
	calls  map[uint64]string
	root   int
	report Report
	live   map[int]bool // threads under trace
	fresh  map[int]bool // threads whose first SIGSTOP has been seen
}

func (t *tracer) trace(argv []string, limit time.Duration) (Report, error) {
	runtime.LockOSThread()
	pid, err := syscall.ForkExec(argv[0], argv, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Ptrace: true},
	})
	if err != nil {
		return Report{}, fmt.Errorf("start %s: %w", argv[0], err)
	}
	t.root = pid
	t.live[pid], t.fresh[pid] = true, true
	if err := t.begin(); err != nil {
		return Report{}, err
	}
	deadline := time.AfterFunc(limit, func() { _ = unix.Kill(pid, unix.SIGKILL) })
	defer deadline.Stop()
	return t.report, t.loop()
}

func (t *tracer) begin() error {
	var status unix.WaitStatus
	if _, err := unix.Wait4(t.root, &status, unix.WALL, nil); err != nil {
		return fmt.Errorf("wait for the first stop: %w", err)
	}
	if err := unix.PtraceSetOptions(t.root, options); err != nil {
		return fmt.Errorf("ptrace options: %w", err)
	}
	return unix.PtraceSyscall(t.root, 0)
}

// loop runs until the last thread of the tree is gone, so that a child that
// outlives the program has finished its work when the report is written.
func (t *tracer) loop() error {
	for {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WALL, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ECHILD):
			return nil
		case err != nil:
			return fmt.Errorf("wait: %w", err)
		case status.Exited() || status.Signaled():
			t.ended(tid, status)
		default:
			t.stopped(tid, status)
		}
	}
}

func (t *tracer) ended(tid int, status unix.WaitStatus) {
	delete(t.live, tid)
	if tid != t.root {
		return
	}
	t.report.Exit = status.ExitStatus()
	if status.Signaled() {
		t.report.Exit = 128 + int(status.Signal())
	}
}

func (t *tracer) stopped(tid int, status unix.WaitStatus) {
	t.live[tid] = true
	forward := 0
	switch signal := status.StopSignal(); {
	case signal == syscallStop:
		t.entry(tid)
	case signal == unix.SIGTRAP:
	case signal == unix.SIGSTOP && !t.fresh[tid]:
		t.fresh[tid] = true
	default:
		forward = int(signal)
	}
	// A thread that was just killed cannot be resumed; its end is reported later.
	_ = unix.PtraceSyscall(tid, forward)
}

func (t *tracer) entry(tid int) {
	info, err := syscallInfo(tid)
	if err != nil || info.op != opEntry {
		return
	}
	name := changing(tid, info, t.calls[info.nr])
	if name == "" {
		return
	}
	t.report.Points++
	if t.report.Points != t.at {
		return
	}
	owner := group(tid)
	t.report.Killed, t.report.Call = true, name
	t.report.Root, t.report.Process = owner == t.root, comm(owner)
	t.kill(owner)
}

func (t *tracer) kill(owner int) {
	switch t.policy {
	case "self":
		_ = unix.Kill(owner, t.signal)
	case "root":
		_ = unix.Kill(t.root, t.signal)
	case "all":
		for tid := range t.live {
			_ = unix.Kill(group(tid), t.signal)
		}
	case "pause":
		// Nothing else waits for children meanwhile, so the shell's end is not lost to the loop.
		if out, err := exec.Command("/bin/sh", "-c", t.run).CombinedOutput(); err != nil {
			t.report.Output = fmt.Sprintf("%v: %s", err, out)
		}
	}
}

const opEntry = 1

// call is the kernel's struct ptrace_syscall_info at the entry of a call.
type call struct {
	op   uint8
	_    [3]uint8
	arch uint32
	ip   uint64
	sp   uint64
	nr   uint64
	args [6]uint64
}

func syscallInfo(tid int) (call, error) {
	const getSyscallInfo = 0x420e
	var c call
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, getSyscallInfo, uintptr(tid),
		unsafe.Sizeof(c), uintptr(unsafe.Pointer(&c)), 0, 0)
	if errno != 0 {
		return call{}, errno
	}
	return c, nil
}

// group is the process that a thread belongs to.
func group(tid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return tid
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, "Tgid:"); ok {
			if pid, err := strconv.Atoi(strings.TrimSpace(value)); err == nil {
				return pid
			}
		}
	}
	return tid
}

func comm(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(b))
}
