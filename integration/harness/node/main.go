// SPDX-License-Identifier: Apache-2.0

// Package node runs a test binary inside a Kubernetes-like node that is made for
// the run (scripts/node.sh).
//
// The binary has two lives: the first, on the machine, starts the node and runs
// the binary again inside it; the second, in the node, runs the tests.
//
//	PODLACE_BIN   folder of the plugins (default ../../../bin)
//	CONTAINERD    containerd to run instead of the one in PATH, 1.6 or newer
//	KERNELTEST    "require" makes a missing prerequisite a failure
package node

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

const (
	insideEnv = "PODLACE_TEST_IN_NODE"
	skipEnv   = "PODLACE_TEST_SKIP"
)

// Lab is a node with the preconditions of its tests.
type Lab struct {
	Needs func() error // returns an Unmet if the tests need something that is missing; may be nil
	Warm  func() error // runs first in the node
	Env   []string     // additional environment of scripts/node.sh
}

// Unmet names a missing precondition, because of which the tests are skipped.
type Unmet string

func (e Unmet) Error() string { return string(e) }

// Skip skips the test if there is no node.
func Skip(t testing.TB) {
	t.Helper()
	if reason := os.Getenv(skipEnv); reason != "" {
		t.Skip("SKIP, no node:", reason)
	}
}

// Main runs the tests in a node and returns the exit code; TestMain calls it.
func (l Lab) Main(m *testing.M) int {
	flag.Parse()
	switch {
	case os.Getenv(insideEnv) != "":
		return l.inside(m)
	case flag.Lookup("test.list").Value.String() != "":
		return m.Run()
	}
	setup, err := l.prerequisites()
	var unmet Unmet
	switch {
	case err == nil:
		return outside(setup)
	case !errors.As(err, &unmet) || os.Getenv("KERNELTEST") == "require":
		fmt.Println("FAIL: no node:", err)
		return 1
	}
	_ = os.Setenv(skipEnv, err.Error())
	return m.Run()
}

// inside runs the tests in the node.
func (l Lab) inside(m *testing.M) int {
	if err := l.Warm(); err != nil {
		fmt.Println("FAIL: the node's first steps:", err)
		return 1
	}
	return m.Run()
}

// outside starts the node, runs this program again inside it, and checks that nothing of the node remains.
func outside(s setup) int {
	dir, err := os.MkdirTemp("", "podlace-node-")
	if err != nil {
		fmt.Println("FAIL:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	n, err := startNode(dir, s)
	if err != nil {
		fmt.Printf("FAIL: start of the node: %v\n%s", err, logTail(dir))
		return 1
	}
	code := n.runTests()
	if code != 0 {
		fmt.Print(logTail(dir))
	}
	if err := n.stop(); err != nil {
		fmt.Println("FAIL: end of the node:", err)
		return 1
	}
	return code
}

// setup contains the absolute paths of the files that a node needs.
type setup struct {
	script, plugins, busybox string
	env                      []string
}

// prerequisites returns the files that a node needs, or the reason why the node cannot start.
func (l Lab) prerequisites() (setup, error) {
	var s setup
	var err error
	if s.script, err = filepath.Abs("../../../scripts/node.sh"); err != nil {
		return setup{}, err
	}
	out, err := exec.Command(s.script, "check").CombinedOutput()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return setup{}, Unmet(bytes.TrimSpace(out))
	case err != nil:
		return setup{}, err
	}
	if s.busybox, err = staticBusybox(); err != nil {
		return setup{}, err
	}
	if l.Needs != nil {
		if err := l.Needs(); err != nil {
			return setup{}, err
		}
	}
	s.env = l.Env
	s.plugins, err = Plugins()
	return s, err
}

// Plugins returns the folder of the tested plugins.
func Plugins() (string, error) {
	dir, err := filepath.Abs(cmp.Or(os.Getenv("PODLACE_BIN"), "../../../bin"))
	if err != nil {
		return "", err
	}
	for _, name := range []string{"bridge", "host-local", "loopback", "portmap", "bandwidth"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return "", Unmet("no plugin to test, run make build: " + err.Error())
		}
	}
	return dir, nil
}

// staticBusybox finds a busybox that runs in an image without libraries.
func staticBusybox() (string, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return "", Unmet("missing: a statically linked busybox")
	}
	if linked, err := dynamic(path); err != nil || linked {
		return "", Unmet("missing: a statically linked busybox; " + path + " is not")
	}
	return path, nil
}
