// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"debug/elf"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const root = "../.."

// copySource copies the source of one program into a new folder, with other modification times and only readable by the owner.
func copySource(t *testing.T) string {
	t.Helper()
	to := t.TempDir()
	for _, folder := range []string{"conf", "pkg", "plugins/loopback"} {
		if err := os.CopyFS(filepath.Join(to, folder), os.DirFS(filepath.Join(root, folder))); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"go.mod", "go.sum", "LICENSE"} {
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(to, name), string(data), 0o600)
	}
	return to
}

func testOptions(folder string) buildOptions {
	return buildOptions{root: folder, ldflags: "-s -w", version: "v1.2.3", revision: "abc", at: time.Unix(1_700_000_000, 0).UTC()}
}

// TestReproducible builds an image of one program in two folders, one of them a git clone, and compares the bytes, which folders,
// modification times and git must not affect. Both may use Go's build cache, whose keys differ with the inputs.
func TestReproducible(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is missing, which makes one of the folders")
	}
	var digests []string
	for _, script := range []string{"true", "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm a"} {
		folder := copySource(t)
		prepare := exec.Command("sh", "-c", script)
		prepare.Dir = folder
		if says, err := prepare.CombinedOutput(); err != nil {
			t.Fatalf("%s: %s, %v", script, says, err)
		}
		index, err := buildIndex(testOptions(folder))
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest(t, index))
	}
	if digests[0] != digests[1] {
		t.Errorf("built in two folders: %v", digests)
	}
}

// TestBuild builds the whole image and checks its content.
func TestBuild(t *testing.T) {
	if testing.Short() {
		t.Skip("builds all programs for two platforms")
	}
	o := testOptions(root)
	first, err := buildIndex(o)
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	writeFile(t, filepath.Join(out, "image.tar"), "of before", 0o600)
	if err := os.MkdirAll(filepath.Join(out, "image/blobs/of-before"), 0o755); err != nil {
		t.Fatal(err)
	}
	tag, err := imageName("registry.example.com/podlace:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := saveImage(out, first, tag, o.at); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(out, "image/blobs/of-before")); !os.IsNotExist(err) {
		t.Errorf("a blob of the layout before: %v", err)
	}
	for _, folder := range []string{filepath.Join(out, "image"), unpackArchive(t, filepath.Join(out, "image.tar"))} {
		layout, digests := digestsByName(t, folder)
		index, err := layout.ImageIndex(digests[tag.Name()])
		if err != nil {
			t.Fatal(err)
		}
		checkIndex(t, index, o)
	}
}

func checkIndex(t *testing.T, index v1.ImageIndex, o buildOptions) {
	t.Helper()
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	machines := map[string]elf.Machine{"linux/amd64": elf.EM_X86_64, "linux/arm64": elf.EM_AARCH64}
	for _, m := range manifest.Manifests {
		machine, ok := machines[m.Platform.String()]
		delete(machines, m.Platform.String())
		img, err := index.Image(m.Digest)
		if err != nil || !ok {
			t.Fatalf("platform %s: %v", m.Platform, err)
		}
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		want := v1.Config{Entrypoint: []string{"/podlace-node"}, Cmd: []string{"run"}, Labels: imageLabels(o)}
		if diff := cmp.Diff(want, config.Config); diff != "" {
			t.Error(diff)
		}
		if got := config.OS + "/" + config.Architecture; got != m.Platform.String() || !config.Created.Equal(o.at) {
			t.Errorf("the config of %s says %s, %s", m.Platform, got, config.Created)
		}
		layers, err := img.Layers()
		if err != nil || len(layers) != 1 {
			t.Fatal(layers, err)
		}
		checkPrograms(t, layers[0], machine, o)
	}
	if len(machines) > 0 {
		t.Errorf("no image for %v", machines)
	}
}

// checkPrograms checks that the image has one program for each folder below plugins/, at the path that the agent and the manifests expect.
func checkPrograms(t *testing.T, layer v1.Layer, machine elf.Machine, o buildOptions) {
	t.Helper()
	byName, names := layerHeaders(t, layer, o.at)
	want := []string{"LICENSE", "plugins/"}
	sources, err := os.ReadDir(filepath.Join(root, "plugins"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sources {
		switch s.Name() {
		case "podlace", "podlace-node", "sriov-device-plugin":
			want = append(want, s.Name())
		default:
			want = append(want, "plugins/"+s.Name())
		}
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
	for _, name := range []string{"plugins/bridge", "podlace"} {
		program := extractProgram(t, layer, name)
		f, err := elf.Open(program)
		if err != nil {
			t.Fatal(err)
		}
		if libraries, err := f.ImportedLibraries(); f.Machine != machine || err != nil || len(libraries) > 0 || byName[name].Mode != 0o755 {
			t.Errorf("%s is for %s, mode %o, needs %v, %v", name, f.Machine, byName[name].Mode, libraries, err)
		}
		_ = f.Close()
		if name == "podlace" && machine == elf.EM_X86_64 && runtime.GOARCH == "amd64" {
			if says, err := exec.Command(program, "--help").CombinedOutput(); err != nil || !strings.Contains(string(says), "podlace") {
				t.Errorf("podlace --help: %s, %v", says, err)
			}
		}
	}
}

// extractProgram writes a program of a layer into a new file.
func extractProgram(t *testing.T, layer v1.Layer, name string) (path string) {
	t.Helper()
	r, err := layer.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if h.Name == name {
			data, err := io.ReadAll(in)
			if err != nil {
				t.Fatal(err)
			}
			return writeFile(t, filepath.Join(t.TempDir(), filepath.Base(name)), string(data), 0o755)
		}
	}
}
