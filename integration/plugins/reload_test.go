// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestReloadWithoutPods: the node has no pods, so `podlace reload` has nothing to restore and creates no table.
func TestReloadWithoutPods(t *testing.T) {
	harness.Program(t, "nft")
	harness.Need(t, "podlace")
	// Earlier tests leave empty nftables tables and marker files of their networks on the node.
	harness.Shell(t, "nft flush ruleset; mkdir -p /run/podlace; mount -t tmpfs none /run/podlace")
	t.Cleanup(func() { harness.Shell(t, "umount /run/podlace") })
	before := harness.Watch(t)
	if got, want := harness.Shell(t, filepath.Join(harness.BinDir(), "podlace")+" reload"),
		"reloaded: 0 attachments of bridge, 0 with hostPorts, 0 with limits\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	before.Clean(t, "reload")
}
