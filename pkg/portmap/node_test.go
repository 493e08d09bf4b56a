// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"testing"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

func mustDo(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// flush empties the whole of nftables now and at the end of the test, as an admin's "nft flush ruleset" does.
func flush(t testing.TB) {
	t.Helper()
	mustDo(t, flushNFT())
	t.Cleanup(func() { mustDo(t, flushNFT()) })
}

func addBridge(t testing.TB, name string, addresses ...string) {
	t.Helper()
	mustDo(t, addLink(name, addresses...))
	t.Cleanup(func() { mustDo(t, delLink(name)) })
}

// newNode is a node with the addresses on a bridge.
func newNode(t testing.TB, addresses ...string) *kernel.Node {
	t.Helper()
	kerneltest.Clean(t)
	addBridge(t, "kt0", addresses...)
	return openHost(t)
}

// records returns the lines of a snapshot of the host that hold all parts.
func records(t testing.TB, parts ...string) []string {
	t.Helper()
	return kerneltest.Records(t, parts...)
}
