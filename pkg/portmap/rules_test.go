// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
)

// TestRules compares the chains and rules that the kernel lists with golden files. -update rewrites the files. A change of the hostPort
// rules needs a new schema number.
func TestRules(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	kerneltest.Must(t, ProtectLoopback(h), restored(h, nil))
	for _, table := range []string{nft.HostportTable, nft.LoopbackTable} {
		kerneltest.Golden(t, table, *update)
	}
}
