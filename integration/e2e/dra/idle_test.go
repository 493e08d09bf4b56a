// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

var idle = flag.Duration("idle", time.Minute, "TestIdle: how long nothing happens")

// maxResident is the daemon's maximum resident memory in KiB.
const maxResident = 72 << 10

// TestIdle: besides its watches, an idle daemon sends the API server at most one request a minute and writes no objects. It uses at most
// maxResident KiB of memory.
func TestIdle(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	time.Sleep(10 * time.Second) // the status of the claim is written after ADD
	mark := l.mark()
	time.Sleep(*idle)
	var asked []string
	for _, r := range l.requests(mark, account, "") {
		if r.Verb != "watch" {
			asked = append(asked, r.Verb+" "+r.RequestURI)
		}
		if r.isWrite() {
			t.Errorf("the daemon wrote: %s %s", r.Verb, r.RequestURI)
		}
	}
	if most := 1 + int(*idle/time.Minute); len(asked) > most {
		t.Errorf("%d requests in %s: %q, want at most %d", len(asked), *idle, asked, most)
	}
	resident := residentOf(t, l.cmd.Process.Pid)
	if resident > maxResident {
		t.Errorf("%d KiB are resident: want at most %d", resident, maxResident)
	}
	t.Logf("%d requests in %s, %d KiB resident", len(asked), *idle, resident)
}

// residentOf returns the resident memory of a process in KiB (proc_pid_status(5)).
func residentOf(t *testing.T, pid int) (kib int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}
