// SPDX-License-Identifier: Apache-2.0

// Package pcitest creates fake sysfs trees of machines with network cards, which functions of package pci accept as the path of sysfs.
// Extract creates one from an archive, and Generate one of any size.
//
// An archive is in the format txtar. An entry whose name ends in "/" is a folder, and each of its lines a file, such as "numa_node 0", or a
// symlink, such as "driver -> ../../../bus/pci/drivers/igb". Any other entry is a file with several lines. Extract adds a link in
// bus/pci/devices to each folder below devices that has a PCI address as its name.
package pcitest

import (
	"embed"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
)

//go:embed testdata/*.txtar
var archives embed.FS

// Archives returns the names of all archives in testdata.
func Archives() (names []string) {
	files, _ := fs.Glob(archives, "testdata/*.txtar")
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".txtar"))
	}
	return names
}

// Extract unpacks an archive into a temporary folder.
func Extract(t testing.TB, archive string) (sysfs string) {
	t.Helper()
	text, err := archives.ReadFile("testdata/" + archive + ".txtar")
	must(t, err)
	sysfs = t.TempDir()
	for _, f := range txtar.Parse(text).Files {
		if dir, ok := strings.CutSuffix(f.Name, "/"); ok {
			fillFolder(t, filepath.Join(sysfs, dir), string(f.Data))
		} else {
			write(t, filepath.Join(sysfs, f.Name), string(f.Data))
		}
	}
	must(t, filepath.WalkDir(filepath.Join(sysfs, "devices"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && function.MatchString(e.Name()) {
			addToBus(t, sysfs, path)
		}
		return err
	}))
	return sysfs
}

var function = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// addToBus adds a link to a PCI function in bus/pci/devices.
func addToBus(t testing.TB, sysfs, folder string) {
	t.Helper()
	path, err := filepath.Rel(sysfs, folder)
	must(t, err)
	symlink(t, "../../../"+path, filepath.Join(sysfs, "bus/pci/devices", filepath.Base(folder)))
}

// fillFolder creates a folder with the files and symlinks that the lines of an archive entry describe.
func fillFolder(t testing.TB, dir, lines string) {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o755))
	for line := range strings.Lines(lines) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		if target, ok := strings.CutPrefix(text, "-> "); ok {
			symlink(t, target, filepath.Join(dir, name))
		} else if name != "" {
			write(t, filepath.Join(dir, name), text+"\n")
		}
	}
}

// Folder returns the folder of a PCI function. The returned path contains no symlinks.
func Folder(t testing.TB, sysfs, address string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, "bus/pci/devices", address))
	must(t, err)
	return dir
}

// Set atomically replaces an attribute of a PCI function, which may be in a subfolder, such as "net/ens1f0/carrier". A value "-> target"
// makes a symlink.
func Set(t testing.TB, sysfs, address, name, value string) {
	t.Helper()
	path, made := filepath.Join(Folder(t, sysfs, address), name), t.TempDir()
	fillFolder(t, made, filepath.Base(path)+" "+value)
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	made = filepath.Join(made, filepath.Base(path))
	if os.Rename(made, path) != nil { // the path is a folder
		must(t, os.RemoveAll(path))
		must(t, os.Rename(made, path))
	}
}

// Remove removes a PCI function from the tree. If the PCI function is a PF, Remove also removes its VFs.
func Remove(t testing.TB, sysfs, address string) {
	t.Helper()
	must(t, remove(sysfs, address))
}

func remove(sysfs, address string) error {
	at := filepath.Join(sysfs, "bus/pci/devices", address)
	dir, err := filepath.EvalSymlinks(at)
	if err != nil {
		return err
	}
	if err := removeVFs(sysfs, dir); err != nil {
		return err
	}
	if err := os.Remove(at); err != nil {
		return err
	}
	// The PF's link to a removed VF must disappear too.
	links, _ := filepath.Glob(filepath.Join(dir, "physfn/virtfn*"))
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && filepath.Base(target) == address {
			if err := os.Remove(l); err != nil {
				return err
			}
		}
	}
	return os.RemoveAll(dir)
}

// removeVFs removes the VFs of the PF with this folder.
func removeVFs(sysfs, pf string) error {
	links, _ := filepath.Glob(filepath.Join(pf, "virtfn*"))
	for _, l := range links {
		target, err := os.Readlink(l)
		if err != nil {
			return err
		}
		if err := remove(sysfs, filepath.Base(target)); err != nil {
			return err
		}
	}
	return nil
}

// WriteFiles writes files into a new temporary folder and returns the folder's path.
func WriteFiles(t testing.TB, files map[string]string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	for name, text := range files {
		write(t, filepath.Join(folder, name), text)
	}
	return folder
}

func write(t testing.TB, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, []byte(text), 0o644))
}

func symlink(t testing.TB, target, path string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.Symlink(target, path))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
