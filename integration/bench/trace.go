// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// startedProcesses counts child processes and executed programs.
type startedProcesses struct {
	Processes int            `json:"processes"` // forks, including processes that never execute a program
	Programs  map[string]int `json:"programs"`
}

func (s *startedProcesses) add(other startedProcesses) {
	s.Processes += other.Processes
	for name, n := range other.Programs {
		s.Programs[name] += n
	}
}

// runTraced starts a plugin under strace and counts its descendants and executed programs. Short-lived ones would be missing in /proc.
func (inv invocation) runTraced() ([]byte, startedProcesses, error) {
	folder, err := os.MkdirTemp("", "podlace-trace-")
	if err != nil {
		return nil, startedProcesses{}, err
	}
	defer func() { _ = os.RemoveAll(folder) }() // best effort: it is a temporary folder
	log := filepath.Join(folder, "calls")
	// With -z, strace prints one line for each successful system call and none for failed ones.
	inv.args = []string{"-f", "-qq", "-z", "-e", "signal=none", "-e", "trace=execve,clone,?clone3,?fork,?vfork", "-o", log, inv.path}
	inv.path = "strace"
	out, err := executeProcess(inv)
	if err != nil {
		return nil, startedProcesses{}, err
	}
	calls, err := os.ReadFile(log)
	if err != nil {
		return nil, startedProcesses{}, fmt.Errorf("read what strace saw: %w", err)
	}
	return out, countStarted(string(calls)), nil
}

// countStarted counts the forks and executions in strace's output, except the first execve, which starts the traced program.
func countStarted(calls string) startedProcesses {
	execution, fork := regexp.MustCompile(`^\d+ +execve\("([^"]*)"`), regexp.MustCompile(`^\d+ +(clone3?|v?fork)\(`)
	s := startedProcesses{Programs: map[string]int{}}
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
