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

// TestSocketAt: a socket is known by its ID, its file stays when it is closed, and only then RemoveStale deletes it.
func TestSocketAt(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one.sock"), filepath.Join(dir, "two.sock")
	l, own, err := Listen(one)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := Listen(two)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	second, _ := SocketAt(two)
	if id, ok := SocketAt(one); !ok || !id.Same(own) || second.Same(own) {
		t.Errorf("%+v, %t, want %+v; the other %+v", id, ok, own, second)
	}
	if _, ok := SocketAt(dir); ok {
		t.Error("a folder is taken for a socket")
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, ok := SocketAt(one); !ok || Answered(one) {
		t.Errorf("closed: the file stays: %t, answered: %t", ok, Answered(one))
	}
	RemoveStale(filepath.Join(dir, "*.sock"))
	_, first := SocketAt(one)
	if _, ok := SocketAt(two); !ok || first {
		t.Errorf("afterwards: the served socket %t, the stale one %t", ok, first)
	}
}
