// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// unpackArchive writes the files of an archive into a new folder.
func unpackArchive(t *testing.T, archive string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if err == io.EOF {
			return folder
		}
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(folder, h.Name)
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(to, 0o755)
		} else {
			var data []byte
			if data, err = io.ReadAll(in); err == nil {
				err = os.WriteFile(to, data, 0o644)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// digestsByName returns the digests in the index.json of a layout. The keys of the map are containerd's image names.
func digestsByName(t *testing.T, folder string) (index v1.ImageIndex, digests map[string]v1.Hash) {
	t.Helper()
	index, err := layout.ImageIndexFromPath(folder)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	digests = map[string]v1.Hash{}
	for _, m := range manifest.Manifests {
		digests[m.Annotations["io.containerd.image.name"]] = m.Digest
	}
	return index, digests
}

// TestPack reads an image of several files from the layout, as containerd does, and from manifest.json, as docker does.
func TestPack(t *testing.T) {
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	if err := os.MkdirAll(filepath.Join(tree, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	program := writeFile(t, filepath.Join(dir, "program"), "#!", 0o700)
	writeFile(t, filepath.Join(tree, "sub/data"), "text", 0o600)
	for to, from := range map[string]string{filepath.Join(tree, "link"): "sub/data", filepath.Join(dir, "alias"): program} {
		if err := os.Symlink(from, to); err != nil {
			t.Fatal(err)
		}
	}
	pack := func(out string) []byte {
		t.Helper()
		err := run([]string{"pack", "-name", "registry.example.com/a/b:1", "-name", "localhost/c:2", "-out", out, "-platform", "linux/arm64",
			"-entrypoint", "/bin/program", "-entrypoint", "two words", "-cmd", "x", "-env", "A=B", "-user", "65534", "-workdir", "/data",
			"/bin/program=" + filepath.Join(dir, "alias"), "/data=" + tree, "link:/bin/sh=program", "dir:/tmp=1777"})
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	archive := filepath.Join(dir, "one.tar")
	if !bytes.Equal(pack(archive), pack(filepath.Join(dir, "two.tar"))) {
		t.Error("the same arguments gave other bytes")
	}
	index, digests := digestsByName(t, unpackArchive(t, archive))
	if len(digests) != 2 || digests["registry.example.com/a/b:1"] != digests["localhost/c:2"] {
		t.Fatalf("names in the layout: %v", digests)
	}
	img, err := index.Image(digests["localhost/c:2"])
	if err != nil {
		t.Fatal(err)
	}
	checkPacked(t, img)
	for _, s := range []string{"registry.example.com/a/b:1", "localhost/c:2"} {
		tag, err := name.NewTag(s)
		if err != nil {
			t.Fatal(err)
		}
		docker, err := tarball.ImageFromPath(archive, &tag)
		if err != nil {
			t.Fatal(err)
		}
		if err := validate.Image(docker); err != nil {
			t.Errorf("%s by manifest.json: %v", s, err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".pack-*")); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

func checkPacked(t *testing.T, img v1.Image) {
	t.Helper()
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	want := v1.Config{Entrypoint: []string{"/bin/program", "two words"}, Cmd: []string{"x"}, Env: []string{"A=B"}, User: "65534",
		WorkingDir: "/data"}
	if diff := cmp.Diff(want, config.Config); diff != "" || config.OS != "linux" || config.Architecture != "arm64" {
		t.Errorf("%s/%s, config: %s", config.OS, config.Architecture, diff)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatal(layers, err)
	}
	byName, names := layerHeaders(t, layers[0], time.Unix(0, 0))
	paths := []string{"bin/", "bin/program", "bin/sh", "data/", "data/link", "data/sub/", "data/sub/data", "tmp/"}
	if diff := cmp.Diff(paths, names); diff != "" {
		t.Fatal(diff)
	}
	modes := map[string]int64{"bin/program": 0o755, "data/sub/data": 0o644, "data/": 0o755, "data/sub/": 0o755, "tmp/": 0o1777}
	for path, mode := range modes {
		if byName[path].Mode != mode {
			t.Errorf("%s has mode %o, want %o", path, byName[path].Mode, mode)
		}
	}
	if a, b := byName["bin/sh"].Linkname, byName["data/link"].Linkname; a != "program" || b != "sub/data" {
		t.Errorf("links lead to %q and %q", a, b)
	}
}

// The error of a wrong argument contains the argument, and no file is written.
func TestRefusedArguments(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "x.tar")
	f := writeFile(t, filepath.Join(dir, "f"), "text", 0o644)
	for want, args := range map[string][]string{
		"-name and -out are required":       {"pack", "-out", out, "/f=" + f},
		`image name "podlace:1"`:            {"pack", "-out", out, "-name", "podlace:1", "/f=" + f},
		`image name "r.example.com/x"`:      {"pack", "-out", out, "-name", "r.example.com/x", "/f=" + f},
		`argument "/f"`:                     {"pack", "-out", out, "-name", "r.example.com/x:1", "/f"},
		`argument "/f=/no/such/file"`:       {"pack", "-out", out, "-name", "r.example.com/x:1", "/f=/no/such/file"},
		`argument "dir:/d=rwx"`:             {"pack", "-out", out, "-name", "r.example.com/x:1", "dir:/d=rwx"},
		"/dev/null is neither a file":       {"pack", "-out", out, "-name", "r.example.com/x:1", "/n=/dev/null"},
		"-platform":                         {"pack", "-out", out, "-name", "r.example.com/x:1", "-platform", "a/b/c/d", "/f=" + f},
		"not the folder of the source":      {"build", "-out", dir, "-name", "r.example.com/x:1", "-root", dir},
		"build: -out is required":           {"build", "-name", "r.example.com/x:1"},
		"which command?":                    {"pck"},
		"flag provided but not defined: -x": {"manifest", "-x"},
	} {
		t.Run(want, func(t *testing.T) {
			if err := run(args); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v: %v, want it to say %s", args, err, want)
			}
			if _, err := os.Stat(out); !os.IsNotExist(err) {
				t.Errorf("%s: %v", out, err)
			}
		})
	}
}
