// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// writeFile writes a file with a mode.
func writeFile(t *testing.T, path, text string, mode os.FileMode) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// layerHeaders returns a layer's headers by name, and the names in order. All files must be root's and have the expected time.
func layerHeaders(t *testing.T, layer v1.Layer, at time.Time) (byName map[string]*tar.Header, names []string) {
	t.Helper()
	r, err := layer.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	byName = map[string]*tar.Header{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err == io.EOF {
			return byName, names
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" || !h.ModTime.Equal(at) {
			t.Errorf("%s: owner %d:%d %q:%q, time %s; want 0:0 without names, %s", h.Name, h.Uid, h.Gid, h.Uname, h.Gname, h.ModTime, at)
		}
		byName[h.Name], names = h, append(names, h.Name)
	}
}

// TestLayer checks that the bytes of a layer depend only on the entries and the time.
func TestLayer(t *testing.T) {
	dir, at := t.TempDir(), time.Unix(1_700_000_000, 0).UTC()
	entries := func(name string, mode os.FileMode) []imageEntry {
		f := writeFile(t, filepath.Join(dir, name), "text", mode)
		return []imageEntry{
			{path: "/plugins/b", kind: tar.TypeReg, from: f, mode: 0o755},
			{path: "/plugins/a", kind: tar.TypeSymlink, from: "b", mode: 0o777},
			{path: "/a.txt", kind: tar.TypeReg, from: f, mode: 0o644},
		}
	}
	first, err := newLayer(entries("one", 0o600), at)
	if err != nil {
		t.Fatal(err)
	}
	byName, names := layerHeaders(t, first, at)
	if diff := cmp.Diff([]string{"a.txt", "plugins/", "plugins/a", "plugins/b"}, names); diff != "" {
		t.Error(diff)
	}
	for name, mode := range map[string]int64{"a.txt": 0o644, "plugins/": 0o755, "plugins/b": 0o755} {
		if h := byName[name]; h == nil || h.Mode != mode {
			t.Errorf("%s: %+v, want mode %o", name, h, mode)
		}
	}
	if h := byName["plugins/a"]; h == nil || h.Linkname != "b" {
		t.Errorf("the link: %+v", h)
	}
	other := entries("two", 0o777)
	slices.Reverse(other)
	second, err := newLayer(other, at)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := digest(t, first), digest(t, second); a != b {
		t.Errorf("the order of entries, and names and modes of their files, changed the layer: %s and %s", a, b)
	}
}

func digest(t *testing.T, of interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	h, err := of.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return h.String()
}

// TestRefusedEntries checks that a path that is invalid in an image causes an error with this path.
func TestRefusedEntries(t *testing.T) {
	f := writeFile(t, filepath.Join(t.TempDir(), "f"), "text", 0o644)
	for name, c := range map[string]struct {
		paths []string
		want  string
	}{
		"relative":     {[]string{"bin/x"}, `"bin/x"`},
		"out of it":    {[]string{"/bin/../../x"}, `"/bin/../../x"`},
		"root":         {[]string{"/"}, `"/"`},
		"twice":        {[]string{"/bin/x", "/bin/x"}, "/bin/x in the image is given twice"},
		"below a file": {[]string{"/bin", "/bin/x"}, "/bin is a file"},
	} {
		t.Run(name, func(t *testing.T) {
			var entries []imageEntry
			for _, p := range c.paths {
				entries = append(entries, imageEntry{path: p, kind: tar.TypeReg, from: f})
			}
			_, err := newLayer(entries, time.Time{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want it to say %s", err, c.want)
			}
		})
	}
	_, err := newLayer([]imageEntry{{path: "/x", kind: tar.TypeReg, from: f + ".absent"}}, time.Time{})
	if err == nil || !strings.Contains(err.Error(), f+".absent") {
		t.Errorf("an absent file: %v", err)
	}
}
