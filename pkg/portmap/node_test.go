// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
)

func addBridge(t testing.TB, name string, addresses ...string) {
	t.Helper()
	kerneltest.Must(t, addLink(name, addresses...))
	t.Cleanup(func() { kerneltest.Must(t, delLink(name)) })
}

// newNode returns a node with a bridge that has the given addresses.
func newNode(t testing.TB, addresses ...string) *kernel.Node {
	t.Helper()
	kerneltest.Clean(t)
	addBridge(t, "kt0", addresses...)
	return openHost(t)
}

// recordLines returns the lines of the host's snapshot that contain all parts.
func recordLines(t testing.TB, parts ...string) []string {
	t.Helper()
	return kerneltest.Records(t, parts...)
}
