// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/snapshot"
)

func TestDetectsFiles(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(dir string) error
		want string
	}{
		{"new", func(dir string) error { return os.WriteFile(dir+"/new", nil, 0o600) }, "host: file DIR/new appeared"},
		{"gone", func(dir string) error { return os.Remove(dir + "/net/lease") }, "host: file DIR/net/lease vanished"},
		{"content", func(dir string) error { return os.WriteFile(dir+"/net/lease", []byte("b\r\neth0"), 0o600) },
			"host: file DIR/net/lease changed: content 7 bytes .* -> 7 bytes .*"},
		{"mode", func(dir string) error { return os.Chmod(dir+"/net/lease", 0o644) },
			"host: file DIR/net/lease changed: mode -rw------- -> -rw-r--r--"},
		{"owner", func(dir string) error { return os.Chown(dir+"/net/lease", 1, 2) }, "host: file DIR/net/lease changed: owner 0:0 -> 1:2"},
		{"mode of a folder", func(dir string) error { return os.Chmod(dir+"/net", 0o750) },
			"host: folder DIR/net changed: mode drwxr-xr-x -> drwxr-x---"},
		{"link", func(dir string) error { return os.Symlink("net", dir+"/link") }, "host: file DIR/link appeared"},
		{"folder", func(dir string) error { return os.Mkdir(dir+"/empty", 0o700) }, "host: folder DIR/empty appeared"},
		{"first file", func(dir string) error { return os.MkdirAll(dir+"/../missing/x", 0o700) }, "host: folder DIR/../missing/x appeared"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir() + "/state"
			must(t, os.MkdirAll(dir+"/net", 0o755))
			must(t, os.WriteFile(dir+"/net/lease", []byte("a\r\neth0"), 0o600))
			opt := snapshot.Options{Dirs: []string{dir, filepath.Dir(dir) + "/missing"}}
			before, err := snapshot.Take(opt)
			must(t, err)
			if err := c.do(dir); os.IsPermission(err) || err != nil && strings.Contains(err.Error(), "invalid argument") {
				t.Skip(err) // an ordinary user has only one ID
			} else if err != nil {
				t.Fatal(err)
			}
			after, err := snapshot.Take(opt)
			must(t, err)
			want := strings.ReplaceAll(regexp.QuoteMeta(strings.ReplaceAll(c.want, "DIR/..", filepath.Dir(dir))), "DIR", dir)
			want = strings.ReplaceAll(want, `\.\*`, ".*")
			got := snapshot.Diff(before, after)
			if len(got) != 1 || !regexp.MustCompile("^"+want+"$").MatchString(got[0]) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

func TestIgnore(t *testing.T) {
	dir := t.TempDir()
	opt := snapshot.Options{Dirs: []string{dir}, Ignore: regexp.MustCompile(`^host: file .*/lock$`)}
	before, err := snapshot.Take(opt)
	must(t, err)
	must(t, os.WriteFile(dir+"/lock", nil, 0o600))
	must(t, os.WriteFile(dir+"/lock2", nil, 0o600))
	after, err := snapshot.Take(opt)
	must(t, err)
	if got := snapshot.Diff(before, after); len(got) != 1 || got[0] != "host: file "+dir+"/lock2 appeared" {
		t.Errorf("got %q", got)
	}
}
