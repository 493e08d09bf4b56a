// SPDX-License-Identifier: Apache-2.0

// Package release tests the archives and packages of `make release`, whose folder is in RELEASE. REBUILT has archives of a second build,
// from a tarball of the same commit without git.
package release

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// folderFrom returns the folder that an environment variable names, or skips the test if it is not set.
func folderFrom(t *testing.T, variable string) string {
	t.Helper()
	dir := os.Getenv(variable)
	if dir == "" {
		t.Skip("SKIPPED: " + variable + " is not set: run 'make release-check'")
	}
	return dir
}

// unpackArchive unpacks an architecture's archive and returns its top folder.
func unpackArchive(t *testing.T, arch string) string {
	t.Helper()
	archives, err := filepath.Glob(filepath.Join(folderFrom(t, "RELEASE"), "podlace-*-linux-"+arch+".tar.gz"))
	if err != nil || len(archives) != 1 {
		t.Fatalf("archives of %s: %q, %v", arch, archives, err)
	}
	dir := t.TempDir()
	run(t, "", "tar", "-xzf", archives[0], "-C", dir)
	return filepath.Join(dir, strings.TrimSuffix(filepath.Base(archives[0]), ".tar.gz"))
}

func run(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v\n%s", args, err, out)
	}
	return string(out)
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s: no file, %v", pattern, err)
	}
	return paths
}

func TestChecksums(t *testing.T) {
	for _, path := range glob(t, filepath.Join(folderFrom(t, "RELEASE"), "*.sha256")) {
		run(t, filepath.Dir(path), "sha256sum", "--check", "--strict", "--quiet", filepath.Base(path))
	}
}

// A build in another folder, without git, gives the same bytes and thus the same version string.
func TestReproducible(t *testing.T) {
	rebuilt := folderFrom(t, "REBUILT")
	for _, path := range glob(t, filepath.Join(folderFrom(t, "RELEASE"), "*")) {
		first, err := os.ReadFile(path)
		second, err2 := os.ReadFile(filepath.Join(rebuilt, filepath.Base(path)))
		if err != nil || err2 != nil || !bytes.Equal(first, second) {
			t.Errorf("%s differs between two builds: %v, %v", filepath.Base(path), err, err2)
		}
	}
}

// A program's CycloneDX file lists exactly the modules and versions that Go recorded in it.
func TestBOMs(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		dir := unpackArchive(t, arch)
		for _, program := range glob(t, dir+"/bin/*") {
			info, err := buildinfo.ReadFile(program)
			if err != nil {
				t.Fatal(err)
			}
			want := []string{"std " + strings.TrimPrefix(info.GoVersion, "go")}
			for _, m := range info.Deps {
				want = append(want, m.Path+" "+m.Version)
			}
			slices.Sort(want)
			if diff := cmp.Diff(want, bomComponents(t, dir+"/sbom/"+filepath.Base(program)+".cdx.json")); diff != "" {
				t.Errorf("%s %s: modules (-program +SBOM):\n%s", arch, filepath.Base(program), diff)
			}
		}
	}
}

func bomComponents(t *testing.T, path string) (found []string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var bom struct {
		BOMFormat  string
		Components []struct{ Name, Version string }
	}
	if err := json.Unmarshal(data, &bom); err != nil || bom.BOMFormat != "CycloneDX" {
		t.Fatalf("%s: %v, format %q", path, err, bom.BOMFormat)
	}
	for _, c := range bom.Components {
		found = append(found, c.Name+" "+strings.TrimPrefix(c.Version, "go"))
	}
	slices.Sort(found)
	return found
}

// The archive has the license of each module that a program links.
func TestThirdPartyLicenses(t *testing.T) {
	dir := unpackArchive(t, "amd64")
	text, err := os.ReadFile(dir + "/THIRD-PARTY-LICENSES")
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range glob(t, dir+"/bin/*") {
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range info.Deps {
			if !bytes.Contains(text, []byte("=== "+m.Path+" "+m.Version+": ")) {
				t.Errorf("no license of %s %s, which %s links", m.Path, m.Version, filepath.Base(program))
			}
		}
	}
}

// The archive's installer installs all programs into a folder, and its uninstall leaves no file.
func TestInstaller(t *testing.T) {
	dir, into := unpackArchive(t, "amd64"), t.TempDir()
	t.Setenv("DESTDIR", into)
	run(t, "/", dir+"/install.sh")
	count := 0
	for _, program := range glob(t, dir+"/bin/*") {
		for _, to := range []string{"/opt/cni/bin/", "/usr/local/bin/"} {
			if _, err := os.Stat(into + to + filepath.Base(program)); err == nil {
				count++
			}
		}
	}
	if want := len(glob(t, dir+"/bin/*")); count != want {
		t.Errorf("%d of %d programs are installed", count, want)
	}
	run(t, "/", dir+"/install.sh", "uninstall")
	if left, err := os.ReadDir(into); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Programs of both architectures start and print the version in the archive's name.
func TestVersions(t *testing.T) {
	for arch, emulator := range map[string][]string{"amd64": nil, "arm64": {"qemu-aarch64-static"}} {
		t.Run(arch, func(t *testing.T) {
			dir := unpackArchive(t, arch)
			if emulator != nil {
				if _, err := exec.LookPath(emulator[0]); err != nil {
					t.Skipf("SKIPPED: %s is missing: %v", emulator[0], err)
				}
			}
			name := strings.TrimPrefix(filepath.Base(dir), "podlace-")
			version := strings.TrimSuffix(name, "-linux-"+arch)
			for _, program := range glob(t, dir+"/bin/*") {
				out := run(t, "", append(slices.Clone(emulator), program, "--version")...)
				if line, _, _ := strings.Cut(out, "\n"); !strings.HasSuffix(line, " "+version) {
					t.Errorf("%s --version prints %q, not %s", filepath.Base(program), line, version)
				}
			}
		})
	}
}
