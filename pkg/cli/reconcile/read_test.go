// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/podlace/podlace/pkg/plugin"
)

// TestOnlyRegularFiles: no file in the configuration folder blocks its reader. Symbolic links are followed, and each error names its file.
func TestOnlyRegularFiles(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "elsewhere/a"), `{"name":"a","plugins":[{"type":"bridge","ipam":{"type":"x","dataDir":"/d"}}]}`)
	write(t, filepath.Join(dir, "30-large.conf"), `{"name":"l","type":"bridge"}`+strings.Repeat(" ", 4<<20))
	write(t, filepath.Join(dir, "50-in.conflist"), `{"name":"in","plugins":[{"type":"bridge"}]}`)
	write(t, filepath.Join(dir, "60-torn.conflist"), `{"name":"torn","plugins":[{"type":"bridge"}]}`)
	write(t, filepath.Join(dir, "torn/1.conf"), `{"type":`)
	if err := os.Mkdir(filepath.Join(dir, "in"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"10-x.conf", "in/1.conf"} {
		if err := syscall.Mkfifo(filepath.Join(dir, name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"20-a.conflist": "elsewhere/a", "40-dir.conf": "elsewhere", "45-none.conf": "none"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	networks, notes, err := Networks(dir)
	if err != nil || len(networks) != 1 || networks[0].DataDir() != "/d" || networks[0].Plugin("bridge") == nil ||
		networks[0].Plugin("portmap") != nil {
		t.Errorf("networks %+v, %v", networks, err)
	}
	for i, says := range []string{`/10-x.conf": want a regular file`, `/30-large.conf": larger than 4194304 bytes`,
		`/40-dir.conf": want a regular file`,
		"/45-none.conf: no such file", `/in/1.conf": want a regular file`, "/torn/1.conf: error parsing"} {
		if len(notes) != 6 || !strings.Contains(notes[i], says) {
			t.Fatalf("notes %q, want one with %q", notes, says)
		}
	}
}

func TestPlain(t *testing.T) {
	for text, want := range map[string]string{"shop/web-0": "shop/web-0", "a\x1b[2Jb\nc\td\u202e\xffé": "a?[2Jb?c?d???",
		strings.Repeat("é", 9): "????????", "": ""} {
		most := 13
		if len(text) == 18 {
			most = 8
		}
		if got := plugin.Plain(text, most); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
