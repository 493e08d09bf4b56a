// SPDX-License-Identifier: Apache-2.0

// Package containerd_test runs pods through a real containerd with this repository's plugins, in a node of package node.
package containerd_test

import (
	"os"
	"testing"

	"github.com/podlace/podlace/integration/e2e/containerd/cri"
	"github.com/podlace/podlace/integration/harness/node"
)

// TestMain creates the node, runs a first pod that creates the bridge and the static rules, and then runs the tests.
func TestMain(m *testing.M) {
	os.Exit(node.Lab{Warm: func() error { return cri.WarmUp(socket) }}.Main(m))
}
