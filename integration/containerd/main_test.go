// SPDX-License-Identifier: Apache-2.0

// Package containerd_test runs pods through a real containerd with the plugins
// of this repository, in a node that is made for the run (scripts/node.sh).
//
// The test binary has two lives: the first, on the machine, starts the node and
// runs the binary again inside it; the second, in the node, runs the tests.
//
//	PODLACE_BIN   folder of the plugins (default ../../bin)
//	CONTAINERD    containerd to run instead of the one in PATH, 1.6 or newer
//	KERNELTEST    "require" makes a missing prerequisite a failure
package containerd_test

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
)

const (
	inNodeEnv = "PODLACE_TEST_IN_NODE"
	skipEnv   = "PODLACE_TEST_SKIP"
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	switch {
	case os.Getenv(inNodeEnv) != "":
		return inside(m)
	case flag.Lookup("test.list").Value.String() != "":
		return m.Run()
	}
	setup, err := prerequisites()
	var unmet unmetError
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

// unmetError is what the machine lacks, for want of which tests are skipped.
type unmetError string

func (e unmetError) Error() string { return string(e) }

// inside runs the tests in the node, after a first pod that leaves behind what
// a network's first pod may leave: the bridge and the skeleton of the rules.
func inside(m *testing.M) int {
	if err := warmUp(); err != nil {
		fmt.Println("FAIL: the node's first pod:", err)
		return 1
	}
	return m.Run()
}

// outside starts the node, runs this program again inside it and sees to it
// that nothing of the node is left.
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

// setup is what a node needs, all paths absolute.
type setup struct {
	script, plugins, busybox string
}

// prerequisites says what a node needs and has, or why there can be none.
func prerequisites() (setup, error) {
	var s setup
	var err error
	if s.script, err = filepath.Abs("../../scripts/node.sh"); err != nil {
		return setup{}, err
	}
	out, err := exec.Command(s.script, "check").CombinedOutput()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return setup{}, unmetError(bytes.TrimSpace(out))
	case err != nil:
		return setup{}, err
	}
	if s.busybox, err = staticBusybox(); err != nil {
		return setup{}, err
	}
	s.plugins, err = pluginFolder()
	return s, err
}

func pluginFolder() (string, error) {
	dir, err := filepath.Abs(cmp.Or(os.Getenv("PODLACE_BIN"), "../../bin"))
	if err != nil {
		return "", err
	}
	for _, name := range []string{"bridge", "host-local", "loopback", "portmap", "bandwidth"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return "", unmetError("no plugin to test, run make build: " + err.Error())
		}
	}
	return dir, nil
}

// staticBusybox finds a busybox that runs in an image without libraries.
func staticBusybox() (string, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return "", unmetError("missing: a statically linked busybox")
	}
	if linked, err := dynamic(path); err != nil || linked {
		return "", unmetError("missing: a statically linked busybox; " + path + " is not")
	}
	return path, nil
}

func arch() string { return runtime.GOARCH }
