// SPDX-License-Identifier: Apache-2.0

// Package crio_test runs pods through a real CRI-O with the plugins of this repository. Package node creates the simulated node in which
// these tests run.
//
//	CRIO          folder of crio and pinns (make crio builds one)
//	PODLACE_BIN   folder of the plugins (default ../../../bin)
//	KERNELTEST    "require" makes a missing prerequisite a failure
package crio_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/e2e/containerd/cri"
	"github.com/podlace/podlace/integration/harness/node"
)

const socket = "/run/crio/crio.sock"

func TestMain(m *testing.M) {
	os.Exit(node.Lab{Needs: needs, Warm: func() error { return cri.WarmUp(socket) }}.Main(m))
}

func needs() error {
	if os.Getenv("CRIO") == "" {
		return node.Unmet("CRIO names no folder with CRI-O: run make crio")
	}
	plugins, err := node.Plugins()
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(plugins, "podlace")); err != nil {
		return node.Unmet("run make build: " + err.Error())
	}
	return nil
}

// TestPods runs the common tests with CRI-O, which maps hostPorts itself, but not for 127.0.0.1. A pod cannot connect to its own hostPort,
// because CRI-O's rule for this never matches ("ct status & dnat|snat == dnat").
func TestPods(t *testing.T) { cri.Suite(t, socket, cri.HostPorts{}) }
