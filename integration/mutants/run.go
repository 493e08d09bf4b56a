// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

//go:embed guard.go.tmpl
var guard string

// A goPackage is what "go list" prints about a package.
type goPackage struct {
	Dir, ImportPath, Name              string
	GoFiles, TestGoFiles, XTestGoFiles []string
}

// A trial is the run of the mutants of one package.
type trial struct {
	pkg, dir, bin string
	mutants       []mutant
	tests         []test
	slack         time.Duration // of the time limit of a mutant
}

// A test is one test function, how long it takes and which mutants it reaches.
type test struct {
	name    string
	took    time.Duration
	reached map[int]bool
}

// newTrial builds a package's test program with all its mutants, and runs each test once without one.
func newTrial(p goPackage, seed string) (*trial, error) {
	t := &trial{pkg: strings.TrimPrefix(p.ImportPath, module), dir: p.Dir, bin: filepath.Join(work, "mutants.test"), slack: 10 * time.Second}
	// Only the compiler knows the types. A mutant in its errors is taken out.
	invalid := map[int]bool{}
	for {
		out, err := t.build(p, seed, invalid)
		if err == nil {
			break
		}
		known := len(invalid)
		for _, found := range regexp.MustCompile(`mutant[A-Za-z]*__\((\d+)`).FindAllStringSubmatch(out, -1) {
			id, _ := strconv.Atoi(found[1])
			invalid[id] = true
		}
		if len(invalid) == known {
			return nil, fmt.Errorf("build with mutants: %w\n%s", err, out)
		}
	}
	t.mutants = slices.DeleteFunc(t.mutants, func(m mutant) bool { return invalid[m.id] })
	return t, t.baseline()
}

// build builds the test program and returns the compiler's output.
func (t *trial) build(p goPackage, seed string, invalid map[int]bool) (string, error) {
	replaced := map[string]string{}
	write := func(name, text string) error {
		path := filepath.Join(work, fmt.Sprintf("%d.go", len(replaced)))
		replaced[filepath.Join(p.Dir, name)] = path
		return os.WriteFile(path, []byte(text), 0o644)
	}
	t.mutants = nil
	for _, name := range p.GoFiles {
		text, err := rewrite(t.pkg, filepath.Join(p.Dir, name), seed, &t.mutants, invalid)
		if err == nil {
			err = write(name, text)
		}
		if err != nil {
			return "", err
		}
	}
	if err := write("mutants__.go", strings.NewReplacer("PACKAGE", p.Name, "FOLDER", work).Replace(guard)); err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replaced})
	if err == nil {
		err = os.WriteFile(filepath.Join(work, "overlay.json"), overlay, 0o644)
	}
	if err != nil {
		return "", err
	}
	// The flags of scripts/test.sh, so that other packages are compiled once.
	cmd := exec.Command("go", "test", "-c", "-trimpath", "-vet=off", "-buildvcs=false", "-gcflags=-e", "-ldflags=-s -w",
		"-overlay", filepath.Join(work, "overlay.json"), "-o", t.bin, ".")
	cmd.Dir, cmd.Env = t.dir, append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// attempts is how often a test without a mutant may run, because one that measures time may fail by chance on a busy machine.
const attempts = 3

// baseline finds out which mutants each test reaches. Every test must pass alone.
func (t *trial) baseline() error {
	list := exec.Command(t.bin, "-test.list", ".")
	list.Dir = t.dir
	names, err := list.Output()
	if err != nil {
		return fmt.Errorf("list of tests: %w", err)
	}
	for _, name := range regexp.MustCompile(`(?m)^(Test|Fuzz|Example)\S*$`).FindAllString(string(names), -1) {
		if err := os.WriteFile(filepath.Join(work, "reached"), nil, 0o666); err != nil {
			return err
		}
		began := time.Now()
		v, out := t.run(0, 10*time.Minute, name)
		for n := 1; v != survived && n < attempts; n++ {
			began = time.Now()
			v, out = t.run(0, 10*time.Minute, name)
		}
		if v != survived {
			return fmt.Errorf("%s fails without a mutant: %s\n%s", name, v, out)
		}
		found := test{name: name, took: time.Since(began), reached: map[int]bool{}}
		text, err := os.ReadFile(filepath.Join(work, "reached"))
		if err != nil {
			return err
		}
		for _, id := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(id); err == nil {
				found.reached[n] = true
			}
		}
		t.tests = append(t.tests, found)
	}
	slices.SortStableFunc(t.tests, func(a, b test) int { return cmp.Compare(a.took, b.took) })
	return nil
}

// reached returns the mutants that some test reaches, in the order of the sample.
func (t *trial) reached() []mutant {
	list := slices.Clone(t.mutants)
	list = slices.DeleteFunc(list, func(m mutant) bool {
		return !slices.ContainsFunc(t.tests, func(one test) bool { return one.reached[m.id] })
	})
	slices.SortFunc(list, func(a, b mutant) int { return cmp.Compare(a.order, b.order) })
	return list
}

type verdict string

const survived, killed, timedOut verdict = "survived", "killed", "killed by the time limit"

// failure matches a failed test in a test program's output.
var failure = regexp.MustCompile(`(?m)^--- FAIL: (\w+)`)

// try runs the tests that reach a mutant, those of less than a second first, until one fails twice, because once may be chance.
func (t *trial) try(id int) verdict {
	var names [2][]string
	var took [2]time.Duration
	for _, test := range t.tests {
		if test.reached[id] {
			slow := 0
			if test.took > time.Second {
				slow = 1
			}
			names[slow] = append(names[slow], test.name)
			took[slow] += test.took
		}
	}
	for i := range names {
		if len(names[i]) == 0 {
			continue
		}
		v, out := t.run(id, t.slack+4*took[i], names[i]...)
		for n := 0; v == killed && n < attempts; n++ {
			failed := failure.FindStringSubmatch(out)
			if failed == nil {
				break
			}
			if alone, _ := t.run(id, t.slack+4*took[i], failed[1]); alone != survived {
				return alone
			}
			v, out = t.run(id, t.slack+4*took[i], names[i]...) // the tests after the chance failure have not run
		}
		if v != survived {
			return v
		}
	}
	return survived
}

// run runs tests with one active mutant, or none if id is 0.
func (t *trial) run(id int, limit time.Duration, names ...string) (verdict, string) {
	if err := os.WriteFile(filepath.Join(work, "active"), []byte(strconv.Itoa(id)), 0o644); err != nil {
		return survived, err.Error()
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, t.bin, "-test.failfast", "-test.timeout=0", "-test.run=^("+strings.Join(names, "|")+")$")
	var out bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = t.dir, &out, &out, time.Second
	cmd.Env = append(os.Environ(), "KERNELTEST=require")
	// A mutant may loop forever, but not longer than this process. Pdeathsig comes when the thread that started the program ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err := cmd.Run()
	killOrphans()
	switch {
	case ctx.Err() != nil:
		return timedOut, out.String()
	case err != nil:
		return killed, fmt.Sprintf("%v\n%s", err, &out)
	}
	return survived, out.String()
}
