// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
)

// TestRules compares the chains and rules in the kernel with golden files, which -update rewrites. Each change of the rules needs a higher
// schema number.
func TestRules(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	kerneltest.Must(t, ProtectLoopback(h), restored(h, nil))
	for _, table := range []string{nft.HostportTable, nft.LoopbackTable} {
		kerneltest.Golden(t, table, *update)
	}
}
