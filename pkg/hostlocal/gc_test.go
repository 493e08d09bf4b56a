// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestGCLetsADDIn: an ADD that waits for the lock gets it while GC still releases thousands of leases.
func TestGCLetsADDIn(t *testing.T) {
	l := newQuickLab(t, `"subnet":"10.0.0.0/8"`)
	l.fillFolder(netip.MustParseAddr("10.1.0.0"), 20*gcSlice)
	kerneltest.Must(t, kerneltest.Age(l.dir))
	left := func() int {
		names, err := filepath.Glob(l.dir + "/10.1.*")
		kerneltest.Must(t, err)
		return len(names)
	}
	done := make(chan answer)
	go func() { done <- l.call("GC", "", `"cni.dev/valid-attachments":[]`) }()
	kerneltest.Await(t, "GC has begun", func() bool { return left() < 20*gcSlice })
	l.mustGive("a", "10.0.0.2/8")
	if left() == 0 {
		t.Error("ADD got no lock before GC had released every lease")
	}
	l.ok(<-done)
	if n := left(); n > 0 {
		t.Errorf("GC left %d leases", n)
	}
}
