// SPDX-License-Identifier: Apache-2.0

// Package node runs a test binary inside a temporary node with a container runtime. The script scripts/node.sh creates this node.
//
// The binary runs twice. The first run starts the node on the machine, and
// starts the second run inside the node. The second run executes the tests.
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

// Lab describes the preconditions of tests in a node.
type Lab struct {
	Needs func() error // returns an Unmet if the tests need something that is missing; may be nil
	Warm  func() error // runs first in the node
	Env   []string     // additional environment of scripts/node.sh
}

// Unmet is a missing precondition, which skips the test.
type Unmet string

func (e Unmet) Error() string { return string(e) }

// Skip skips the test if there is no node.
func Skip(t testing.TB) {
	t.Helper()
	if reason := os.Getenv(skipEnv); reason != "" {
		t.Skip("SKIP, no node:", reason)
	}
}

// Main runs the tests in a node and returns the exit code. TestMain calls it.
func (l Lab) Main(m *testing.M) int {
	flag.Parse()
	switch {
	case os.Getenv(insideEnv) != "":
		return l.runInside(m)
	case flag.Lookup("test.list").Value.String() != "":
		return m.Run()
	}
	setup, err := l.findFiles()
	var unmet Unmet
	switch {
	case err == nil:
		return runOutside(setup)
	case !errors.As(err, &unmet) || os.Getenv("KERNELTEST") == "require":
		fmt.Println("FAIL: no node:", err)
		return 1
	}
	_ = os.Setenv(skipEnv, err.Error())
	return m.Run()
}

func (l Lab) runInside(m *testing.M) int {
	if err := l.Warm(); err != nil {
		fmt.Println("FAIL: the node's first steps:", err)
		return 1
	}
	return m.Run()
}

// runOutside runs this program again inside a node, and checks that nothing of the node remains on the machine.
func runOutside(s nodeFiles) int {
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
	if err := n.stopNode(); err != nil {
		fmt.Println("FAIL: end of the node:", err)
		return 1
	}
	return code
}

// nodeFiles are the absolute paths of what a node needs.
type nodeFiles struct {
	script, plugins, busybox string
	env                      []string
}

// findFiles finds what a node needs, or returns why none can start.
func (l Lab) findFiles() (nodeFiles, error) {
	var s nodeFiles
	var err error
	if s.script, err = filepath.Abs("../../../scripts/node.sh"); err != nil {
		return nodeFiles{}, err
	}
	out, err := exec.Command(s.script, "check").CombinedOutput()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return nodeFiles{}, Unmet(bytes.TrimSpace(out))
	case err != nil:
		return nodeFiles{}, err
	}
	if s.busybox, err = staticBusybox(); err != nil {
		return nodeFiles{}, err
	}
	if l.Needs != nil {
		if err := l.Needs(); err != nil {
			return nodeFiles{}, err
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

// staticBusybox returns the path of a static busybox, for an image without libraries.
func staticBusybox() (string, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return "", Unmet("missing: a statically linked busybox")
	}
	if linked, err := isDynamic(path); err != nil || linked {
		return "", Unmet("missing: a statically linked busybox; " + path + " is not")
	}
	return path, nil
}
