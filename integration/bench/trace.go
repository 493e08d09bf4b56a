// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// started counts the processes that a process started, without itself.
type started struct {
	Processes int            `json:"processes"` // forks, including processes that never execute a program
	Programs  map[string]int `json:"programs"`
}

func (s *started) add(other started) {
	s.Processes += other.Processes
	for name, n := range other.Programs {
		s.Programs[name] += n
	}
}

// traced runs an invocation under strace and counts every process and program below it. /proc is not enough, because short-lived
// processes end before it can be read.
func (inv invocation) traced() ([]byte, started, error) {
	folder, err := os.MkdirTemp("", "podlace-trace-")
	if err != nil {
		return nil, started{}, err
	}
	defer func() { _ = os.RemoveAll(folder) }() // best effort: it is a temporary folder
	log := filepath.Join(folder, "calls")
	// With -z each successful call is one line.
	inv.args = []string{"-f", "-qq", "-z", "-e", "signal=none", "-e", "trace=execve,clone,?clone3,?fork,?vfork", "-o", log, inv.path}
	inv.path = "strace"
	out, err := execute(inv)
	if err != nil {
		return nil, started{}, err
	}
	calls, err := os.ReadFile(log)
	if err != nil {
		return nil, started{}, fmt.Errorf("read what strace saw: %w", err)
	}
	return out, countStarted(string(calls)), nil
}

// countStarted evaluates strace's output. The first execve is that of the traced program itself.
func countStarted(calls string) started {
	execution, fork := regexp.MustCompile(`^\d+ +execve\("([^"]*)"`), regexp.MustCompile(`^\d+ +(clone3?|v?fork)\(`)
	s := started{Programs: map[string]int{}}
	first := true
	for line := range strings.Lines(calls) {
		switch program := execution.FindStringSubmatch(line); {
		case program != nil && first:
			first = false
		case program != nil:
			s.Programs[filepath.Base(program[1])]++
		case fork.MatchString(line) && !strings.Contains(line, "CLONE_THREAD"):
			s.Processes++
		}
	}
	return s
}
