// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"flag"
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestRules compares chains and rules, as the kernel tells them, with golden files; -update rewrites them. A change of the rules of
// hostPorts needs another schema number.
func TestRules(t *testing.T) {
	flush(t)
	h := host(t)
	mustDo(t, h.ProtectLoopback(), h.RestoreHostPorts(nil))
	for _, table := range []string{nft.HostportTable, nft.LoopbackTable} {
		kerneltest.Golden(t, table, *update)
	}
}
