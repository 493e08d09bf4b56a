// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"path/filepath"
	"testing"
)

// TestReloadWithoutPods: on a node without pods podlace reload has nothing to bring back, so it makes no table.
func TestReloadWithoutPods(t *testing.T) {
	program(t, "nft")
	need(t, "podlace")
	// Tests before this one leave empty tables, and notes about their networks.
	shell(t, "nft flush ruleset; mkdir -p /run/podlace; mount -t tmpfs none /run/podlace")
	t.Cleanup(func() { shell(t, "umount /run/podlace") })
	before := watch(t)
	if got, want := shell(t, filepath.Join(binDir(), "podlace")+" reload"), "reloaded: 0 attachments of bridge, 0 with hostPorts, 0 with limits\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	before.clean(t, "reload")
}
