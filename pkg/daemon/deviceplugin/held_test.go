// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"os"
	"path/filepath"
	"testing"
)

// TestHasEnded checks that a pod has ended if its folder is gone, and not if the state of the folder is unknown.
func TestHasEnded(t *testing.T) {
	root := t.TempDir()
	if hasEnded(root, "gone") {
		t.Error("without a folder of pods")
	}
	if err := os.MkdirAll(filepath.Join(root, "pods", "alive"), 0o755); err != nil {
		t.Fatal(err)
	}
	for uid, want := range map[string]bool{"alive": false, "gone": true, "": false, ".": false, "../x": false} {
		if got := hasEnded(root, uid); got != want {
			t.Errorf("%q: %t", uid, got)
		}
	}
}
