// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"net/netip"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestGCLetsADDIn: GC of many leases takes the lock again for each slice, so that other verbs get it in between.
func TestGCLetsADDIn(t *testing.T) {
	l := newQuickLab(t, `"subnet":"10.0.0.0/8"`)
	l.fillFolder(netip.MustParseAddr("10.1.0.0"), 3*gcSlice)
	kerneltest.Must(t, kerneltest.Age(l.dir))
	opened := openCounts(t, l.dir, func() { l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[]`)) })
	if n := opened[lockFile]; n != 4 { // one to list the leases
		t.Errorf("GC took the lock %d times", n)
	}
	if left := l.leasesOf(); len(left) > 0 {
		t.Errorf("GC left %d leases", len(left))
	}
}
