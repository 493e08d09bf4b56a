// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// sandboxes is how many run a package's tests at once, more than one because tests wait for the kernel half of their time.
const sandboxes = 3

// partEnv is set in a process that must not distribute its tests, to onePart if this is a part of a parallel run.
const (
	partEnv = "KERNELTEST_PART"
	onePart = "part"
)

// unavailable is added to the exit status of a part without a sandbox. Package testing exits with 0, 1 or 2.
const unavailable = 100

// selected returns the tests that a parallel run distributes, or nil if they must share a process: a flag collects data about it or names a
// subtest, or there is nothing to distribute.
func selected() []string {
	if !flag.Parsed() {
		flag.Parse()
	}
	run, skip := flagValue("run"), flagValue("skip")
	whole := []string{"list", "bench", "fuzz", "cpuprofile", "memprofile", "blockprofile", "mutexprofile", "trace"}
	if slices.ContainsFunc(whole, func(name string) bool { return flagValue(name) != "" }) || testing.CoverMode() != "" ||
		strings.Contains(run+skip, "/") || flagValue("failfast") == "true" {
		return nil
	}
	list := exec.Command("/proc/self/exe", "-test.list="+cmp.Or(run, "."))
	list.Env = append(os.Environ(), partEnv+"=list")
	out, err := list.Output()
	skipped, wrong := regexp.Compile(skip)
	if err != nil || wrong != nil {
		return nil // package testing reports the wrong pattern
	}
	names := slices.DeleteFunc(strings.Fields(string(out)), func(name string) bool {
		return strings.HasPrefix(name, "Benchmark") || skip != "" && skipped.MatchString(name)
	})
	if len(names) < 2 {
		return nil
	}
	return names
}

// flagValue returns the value of a flag of package testing.
func flagValue(name string) string {
	if f := flag.Lookup("test." + name); f != nil {
		return f.Value.String()
	}
	return ""
}

// parts distributes tests among sandboxes and collects the outcome.
type parts struct {
	mu     sync.Mutex
	names  []string // not yet started
	status int      // highest exit status of a part
}

// runParts runs the tests in several sandboxes at once, and returns the exit status for "go test". A part's output comes at its end, so
// that lines of different tests do not mix.
func runParts(names []string) int {
	p := &parts{names: names}
	var running sync.WaitGroup
	for range sandboxes {
		running.Go(func() {
			runtime.LockOSThread() // Pdeathsig applies to the thread that forked
			for part := p.next(); len(part) > 0; part = p.next() {
				p.done(runPart(part))
			}
		})
	}
	running.Wait()
	if p.status >= unavailable {
		p.status -= unavailable
	}
	if p.status == 0 {
		fmt.Println("PASS")
	} else {
		fmt.Println("FAIL")
	}
	return p.status
}

// next takes tests for one sandbox, fewer at a time towards the end, so that all sandboxes end at about the same time.
func (p *parts) next() (part []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status >= unavailable {
		return nil // every part would say the same
	}
	n := min(len(p.names), 1+len(p.names)/(4*sandboxes))
	part, p.names = p.names[:n], p.names[n:]
	return part
}

func (p *parts) done(out []byte, status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status < unavailable {
		p.status = max(p.status, status)
		_, _ = os.Stdout.Write(out)
	}
}

// runPart runs tests in one sandbox and returns their output without the final verdict, which counts for the whole package.
func runPart(names []string) ([]byte, int) {
	args := []string{"-test.run=^(" + strings.Join(names, "|") + ")$"}
	flag.Visit(func(f *flag.Flag) {
		// A log of the opened files, from which "go test" decides whether it may reuse a result, cannot have several writers.
		if f.Name != "test.run" && f.Name != "test.testlogfile" {
			args = append(args, "-"+f.Name+"="+f.Value.String())
		}
	})
	cmd := exec.Command("/proc/self/exe", append(args, flag.Args()...)...)
	cmd.Env = append(os.Environ(), partEnv+"="+onePart)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	status := 0
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		status = exit.ExitCode()
	case err != nil: // killed, or never started
		status, out = 1, append(out, "FAIL: "+err.Error()+"\n"...)
	}
	for _, verdict := range []string{"PASS\n", "FAIL\n", "\x16"} { // package testing marks its lines for test2json with 0x16
		out = bytes.TrimSuffix(out, []byte(verdict))
	}
	return out, status
}
