// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"testing"
)

func TestTraceArgument(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile(filepath.Join(".", "mine"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for argument, want := range map[string]bool{"net.conflist": true, "/etc/cni/net.d/10-x": true, "dir/one.conf": true, "x.json": true,
		"mine": true, "shop/web-0": false, "5d1f8a2b7c90": false, "shop/web.conf-0": false} {
		if got := isFile(argument); got != want {
			t.Errorf("%s: a file %v, want %v", argument, got, want)
		}
	}
}
