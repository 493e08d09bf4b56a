// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestListenOwnerOnly checks that only the owner of a socket can connect to it, because the servers answer everyone who can.
func TestListenOwnerOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, _, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}
