// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// program is a binary that the agent installs. In a cluster its name has the prefix podlace-, because updates of distributions and other
// networks would overwrite files with the names of the reference plugins.
type program struct {
	from, to string
	missing  bool // installed only if no file has its name
}

// programs returns the programs in the order of installation. The first plugin of a chain comes after the others.
func programs() []program {
	return []program{
		{from: "loopback", to: "loopback", missing: true},
		{from: "portmap", to: "podlace-portmap"},
		{from: "bandwidth", to: "podlace-bandwidth"},
		{from: poddevices.Program, to: poddevices.Program}, // sriov starts it
		{from: "sriov", to: "podlace-sriov"},
		{from: "bridge", to: "podlace-bridge"},
		{from: plugin.PodType, to: plugin.PodType},
	}
}

const binaryMode = 0o755

// binaries installs programs from one folder into another. It remembers which installed files were equal to their source, and compares
// again only after one of the two changed.
type binaries struct {
	from, to string
	equal    map[string][2]fs.FileInfo
}

func newBinaries(from, to string) binaries {
	return binaries{from: from, to: to, equal: map[string][2]fs.FileInfo{}}
}

// install installs missing programs, atomically replaces those that differ from their source, and returns the paths it wrote.
func (b *binaries) install() (replaced []string, err error) {
	target, err := store.Make(b.to, binaryMode)
	if err != nil {
		return nil, fmt.Errorf("install plugins: %w", err)
	}
	defer target.Close()
	found := 0
	for _, p := range programs() {
		source, err := os.Stat(filepath.Join(b.from, p.from))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		found++
		if err == nil && b.inPlace(p, source) {
			continue
		}
		if err == nil {
			err = copyProgram(filepath.Join(b.from, p.from), target, p.to)
		}
		if err != nil {
			return replaced, fmt.Errorf("install plugins: %w", err)
		}
		replaced = append(replaced, filepath.Join(b.to, p.to))
	}
	if found == 0 {
		return nil, fmt.Errorf("install plugins: none is in %s", b.from)
	}
	return replaced, nil
}

// inPlace reports whether the installed program has the same content as its source.
func (b *binaries) inPlace(p program, source fs.FileInfo) bool {
	path := filepath.Join(b.to, p.to)
	target, err := os.Lstat(path)
	if p.missing {
		_, err = os.Stat(path) // a dangling symlink counts as missing
		return err == nil
	}
	if err != nil || !target.Mode().IsRegular() || target.Mode().Perm() != binaryMode || target.Size() != source.Size() {
		return false
	}
	if was, ok := b.equal[p.to]; ok && unchanged(was[0], source) && unchanged(was[1], target) {
		return true
	}
	one, err := sum(filepath.Join(b.from, p.from))
	if err != nil {
		return false
	}
	other, err := sum(path)
	if err != nil || one != other {
		return false
	}
	b.equal[p.to] = [2]fs.FileInfo{source, target}
	return true
}

func unchanged(a, b fs.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

func sum(path string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	hash := sha256.New()
	_, err = io.Copy(hash, f)
	return [sha256.Size]byte(hash.Sum(nil)), err
}

func copyProgram(path string, target *store.Dir, name string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return target.CopySync(name, f, binaryMode)
}

// missingPlugins returns the plugins of a conflist that are missing in a folder.
func missingPlugins(conflist []byte, dir string) (missing []string) {
	types, _ := pluginTypes(conflist)
	for _, t := range types {
		if _, err := os.Stat(filepath.Join(dir, t)); err != nil {
			missing = append(missing, t)
		}
	}
	return missing
}

// removePrograms deletes the installed programs except loopback, which another program may have installed.
func removePrograms(dir string) (done []string, err error) {
	d, err := store.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	for _, p := range slices.Backward(programs()) {
		path := filepath.Join(dir, p.to)
		if _, err := os.Lstat(path); err != nil || p.missing {
			continue
		}
		if err := d.Remove(p.to); err != nil {
			return done, err
		}
		done = append(done, "removed "+path)
	}
	return done, nil
}

// writeConflist writes the conflist if it is missing or differs.
func writeConflist(dir string, conflist []byte) (changed bool, err error) {
	d, err := store.Make(dir, 0o755)
	if err != nil {
		return false, err
	}
	defer d.Close()
	if now, err := d.Read(conflistName); err == nil && bytes.Equal(now, conflist) {
		return false, nil
	}
	if err := d.WriteSync(newName, conflist, 0o644); err != nil {
		return false, err
	}
	return true, d.Rename(newName, conflistName)
}

// newName is the conflist's name while it is written. It does not end in .conflist, because runtimes read every such file, even hidden or
// incomplete ones.
const newName = conflistName + ".podlace-new"

// backup is the suffix that takeOver adds to a configuration's file name.
const backup = ".podlace-bak"

// shadowing returns the configurations that keep the runtime from using the agent's conflist: those that sort before it. Those of Multus
// come back as multus, except where they hand pods to the agent's network.
func shadowing(dir, network string) (names, multus []string, err error) {
	all, err := os.ReadDir(dir) // sorted
	for _, file := range all {
		name := file.Name()
		if name >= conflistName || file.IsDir() || !slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(name)) {
			continue
		}
		text, _ := os.ReadFile(filepath.Join(dir, name)) // an unreadable file is of no known program
		switch isMultus, isOurs := reconcile.MultusNetwork(text, network, conflistName); {
		case !isMultus:
			names = append(names, name)
		case !isOurs:
			multus = append(multus, name)
		}
	}
	return names, multus, fault.Ignore(err, fs.ErrNotExist)
}

// networkName returns the name in a conflist, or "".
func networkName(conflist []byte) string {
	var list struct{ Name string }
	_ = json.Unmarshal(conflist, &list) // a conflist of ours is valid
	return list.Name
}

// takeOver renames other networks' configurations so that no runtime reads them.
func takeOver(dir string, names []string) error {
	d, err := store.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	for _, name := range names {
		err = errors.Join(err, d.Rename(name, name+backup))
	}
	return err
}

// undoTakeOver undoes the renames of takeOver. It skips a configuration whose original name exists again, and one whose plugins are
// missing, because the runtime could then not delete pods.
func undoTakeOver(dir, binDir string) (done []string, err error) {
	d, names, err := openFolder(dir)
	if d == nil {
		return nil, err
	}
	defer d.Close()
	for _, name := range names {
		before, ok := strings.CutSuffix(name, backup)
		if !ok || slices.Contains(names, before) {
			continue
		}
		if text, err := d.Read(name); err != nil || binDir != "" && len(missingPlugins(text, binDir)) > 0 {
			continue
		}
		if err := d.Rename(name, before); err != nil {
			return done, err
		}
		done = append(done, "put back "+filepath.Join(dir, before))
	}
	return done, nil
}

// openFolder opens a folder of configurations and returns its sorted file names. d is nil if the folder is missing.
func openFolder(dir string) (d *store.Dir, names []string, err error) {
	d, err = store.Open(dir)
	if err != nil {
		return nil, nil, fault.Ignore(err, fs.ErrNotExist)
	}
	if names, err = d.List(); err != nil {
		d.Close()
		return nil, nil, err
	}
	slices.Sort(names)
	return d, names, nil
}

// nextConfig returns the configuration that a runtime uses once Podlace's conflist is gone, or "" if no other pod network has one. That of
// Multus is none while it hands pods to Podlace.
func nextConfig(dir string) (name string, err error) {
	d, names, err := openFolder(dir)
	if d == nil {
		return "", err
	}
	defer d.Close()
	own, _ := d.Read(conflistName) // without it, Multus' file has no network to hand pods to
	for _, name := range names {
		if name == conflistName || !slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(name)) {
			continue
		}
		text, err := d.Read(name)
		if err != nil {
			continue // as a runtime does
		}
		if isMultus, isOurs := reconcile.MultusNetwork(text, networkName(own), conflistName); isMultus && isOurs && own != nil {
			continue
		}
		types, err := pluginTypes(text)
		var single struct{ Type string }
		if err != nil && json.Unmarshal(text, &single) == nil && single.Type != "" {
			types = []string{single.Type}
		}
		if slices.ContainsFunc(types, func(t string) bool { return t != "" && t != "loopback" }) {
			return name, nil
		}
	}
	return "", nil
}

// removeConflist removes Podlace's conflist with its temporary file, and reports whether the conflist existed.
func removeConflist(dir string) (removed bool, err error) {
	d, names, err := openFolder(dir)
	if d == nil {
		return false, err
	}
	defer d.Close()
	return slices.Contains(names, conflistName), errors.Join(d.Remove(conflistName), d.Remove(newName))
}
