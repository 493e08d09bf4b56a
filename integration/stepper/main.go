// SPDX-License-Identifier: Apache-2.0

// Stepper runs a program under ptrace, counts the system calls of its whole
// process tree that can change something outside the process, and kills at the
// n-th of them, before that call takes effect. It is a tool of the tests: the
// programs it runs carry no hook for it.
//
//	stepper -at 17 -policy self -report /tmp/report.json -- /opt/cni/bin/bridge
//
// Instead of killing it can send another signal (-signal), or hold the caller
// while a shell command changes the world beneath it (-policy pause -run).
//
// Only changing calls are counted because every moment between two changes
// looks the same from outside, so that killing at the entry of the second one
// stands for all of them. With -at 0 nothing is killed and the report holds the
// number of points. Standard streams and environment pass through; the exit
// status is the program's own, or 128 plus the signal that ended it.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Report says what one run did.
type Report struct {
	Points  int    `json:"points"`            // changing calls seen
	Killed  bool   `json:"killed"`            // the n-th call was reached
	Output  string `json:"output,omitempty"`  // of the command that was run there, if it failed
	Call    string `json:"call,omitempty"`    // the call it was killed at
	Process string `json:"process,omitempty"` // name of the process that made it
	Root    bool   `json:"root,omitempty"`    // that process was the program itself
	Exit    int    `json:"exit"`              // the program's exit status
}

func main() {
	at := flag.Int("at", 0, "kill at the n-th changing call, 0 for never")
	policy := flag.String("policy", "self", "what to kill: self (the caller), root (the program), all; or pause")
	signal := flag.Int("signal", int(unix.SIGKILL), "the signal to send")
	run := flag.String("run", "", "shell command to run at the call, with policy pause")
	path := flag.String("report", "", "file to write the report to")
	limit := flag.Duration("timeout", 30*time.Second, "kill everything after this long")
	flag.Parse()
	report, err := step(tracer{at: *at, policy: *policy, signal: unix.Signal(*signal), run: *run}, *limit, flag.Args())
	if err == nil && *path != "" {
		err = write(*path, report)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "stepper:", err)
		os.Exit(125)
	}
	os.Exit(report.Exit)
}

func step(t tracer, limit time.Duration, argv []string) (Report, error) {
	if len(argv) == 0 {
		return Report{}, errors.New("no program given")
	}
	if !slices.Contains([]string{"self", "root", "all", "pause"}, t.policy) {
		return Report{}, fmt.Errorf("policy %q: want self, root, all or pause", t.policy)
	}
	t.calls, t.fresh, t.live = calls(), map[int]bool{}, map[int]bool{}
	return t.trace(argv, limit)
}

func write(path string, r Report) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	return os.WriteFile(path, b, 0o600)
}
