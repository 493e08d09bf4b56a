// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Step is one change of an attachment or of the node, with its description.
type Step struct {
	Text string
	Do   func() error
}

// Networks returns the names of all networks that have or had records since the boot.
func Networks() ([]string, error) {
	entries, err := os.ReadDir(store.Root)
	var names []string
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names, ignoreMissing(err)
}

// Any reports whether a plugin has a record on the node. It looks only at file names.
func Any(plugin string) (bool, error) {
	networks, err := Networks()
	return slices.ContainsFunc(networks, func(network string) bool { return Count(network, plugin) > 0 }), err
}

// Count returns the number of a plugin's records in a network. It looks only at file names.
func Count(network, plugin string) int { return len(recordFiles(network, plugin)) }

// OldestIn yields a plugin's records in a network, the oldest first. Each file is read only when its record is asked for.
func OldestIn(network, plugin string) iter.Seq[Record] {
	return func(yield func(Record) bool) {
		dir, err := store.Open(folder(network))
		if err != nil {
			return
		}
		defer dir.Close()
		written := map[string]time.Time{}
		for _, name := range recordFiles(network, plugin) {
			if at, err := dir.Written(name); err == nil {
				written[name] = at
			}
		}
		byTime := func(a, b string) int { return written[a].Compare(written[b]) }
		for _, name := range slices.SortedFunc(maps.Keys(written), byTime) {
			if rec, err := readRecord(dir, name); err == nil && !yield(rec) {
				return
			}
		}
	}
}

// Addresses returns the recorded addresses of each interface of the attachment, with the prefix length of their subnet. Only the plugin
// that got or assigned them has any. sriov has those of each VF.
func (r Record) Addresses() map[string][]netip.Prefix {
	type iface struct {
		Name      string         `json:"name"`
		Addresses []netip.Prefix `json:"addresses"`
	}
	var state struct {
		iface
		VFs []iface `json:"vfs"`
	}
	_ = json.Unmarshal(r.State, &state)
	found := map[string][]netip.Prefix{r.IfName: state.Addresses}
	for _, v := range state.VFs {
		found[v.Name] = append(found[v.Name], v.Addresses...)
	}
	return found
}

// recordFiles returns the file names of a plugin's records in a network.
func recordFiles(network, plugin string) []string {
	names, _ := store.Names(folder(network), 0)
	return slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, plugin+"-") })
}

// AllOf returns a plugin's records in all networks.
func AllOf(plugin string) (all []Record, err error) {
	networks, err := Networks()
	for _, network := range networks {
		found, e := List(network, plugin)
		all, err = append(all, found...), errors.Join(err, e)
	}
	return all, err
}

// Attachments returns the records of a network by attachment and plugin, and the record files that cannot be decoded.
func Attachments(network string) (found map[Key]map[string]Record, damaged []Damaged, err error) {
	records, damaged, err := ReadRecords(network, "")
	found = map[Key]map[string]Record{}
	for _, rec := range records {
		if found[rec.Key] == nil {
			found[rec.Key] = map[string]Record{}
		}
		found[rec.Key][rec.Plugin] = rec
	}
	return found, damaged, err
}

// Checked returns the recorded state of a CHECK request's attachment. An unreadable record is an error with plugin.CodeStateDiffers, but
// one of a newer version only logs a warning: after a downgrade, an error could make the runtime restart the node's pods.
func Checked[T any](r *plugin.Request) (st T, found bool, err error) {
	rec, found, err := RecordOf[T](KeyOf(r), r.Plugin)
	if isNewer(err) {
		r.Log.Warn("a newer version of Podlace wrote the record; CHECK ignores it", "error", err)
		return st, false, nil
	}
	if err != nil {
		return st, false, plugin.WithHint(plugin.Differs("the record of %s cannot be read: %w", r.Plugin, err), renew)
	}
	return rec.State, found, nil
}

// LostRecord returns the error with which CHECK fails if an attachment of Podlace has lost its record, or nil if a record file exists, for
// example of a newer version.
func LostRecord(r *plugin.Request) error {
	if Recorded(r) {
		return nil
	}
	return plugin.WithHint(plugin.Differs("the record of %s is missing: its rules cannot be restored after a flush", r.Plugin), renew)
}

const renew = "the record cannot be restored, and DEL works without it; delete and recreate the pod"

// RecordsOf returns the records that these plugins stored for one attachment, by plugin. An error about an unreadable record contains its
// path.
func RecordsOf(k Key, plugins ...string) (map[string]Record, error) {
	found := map[string]Record{}
	dir, err := store.Open(folder(k.Network))
	if err != nil {
		return found, ignoreMissing(err)
	}
	defer dir.Close()
	for _, name := range plugins {
		file := name + "-" + k.Hash()
		rec, err := readRecord(dir, file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("record %s: %w", filepath.Join(dir.Path(), file), err)
		}
		found[name] = rec
	}
	return found, nil
}

// RecordOf returns the record that a plugin stored for an attachment, with its decoded state. ok is false if there is none.
func RecordOf[T any](k Key, plugin string) (rec Of[T], ok bool, err error) {
	records, err := RecordsOf(k, plugin)
	if rec.Record, ok = records[plugin]; ok {
		rec.State, err = StateOf[T](rec.Record)
	}
	return rec, ok, err
}

// ByHash searches all networks for a plugin's record of the attachment whose key has the hash. ok is false if none is readable.
func ByHash(plugin, hash string) (rec Record, ok bool, err error) {
	networks, err := Networks()
	for _, network := range networks {
		dir, e := store.Open(folder(network))
		if e != nil {
			err = errors.Join(err, ignoreMissing(e))
			continue
		}
		rec, e = readRecord(dir, plugin+"-"+hash)
		dir.Close()
		if e == nil {
			return rec, true, nil
		}
	}
	return Record{}, false, err
}

// Path returns the path of the record file.
func (r Record) Path() string { return filepath.Join(folder(r.Network), r.Plugin+"-"+r.Hash()) }

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Sorted returns the keys of a map, such as the result of Attachments, in a fixed order.
func Sorted[T any](of map[Key]T) []Key {
	return slices.SortedFunc(maps.Keys(of), func(a, b Key) int {
		return strings.Compare(a.ContainerID+"/"+a.IfName, b.ContainerID+"/"+b.IfName)
	})
}

// Journals is the folder of the VF journals, beside the folders of the networks. A journal contains a VF's settings from the time before a
// pod got the VF.
const Journals = ".vfs"

// Journaled returns the PCI addresses of all VFs that have a journal. A VF has one while a pod uses it, and afterwards until its settings
// are restored.
func Journaled() ([]string, error) {
	dir, err := store.Open(filepath.Join(store.Root, Journals))
	if err != nil {
		return nil, ignoreMissing(err)
	}
	defer dir.Close()
	names, err := dir.List()
	return slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, ".") }), err
}

// Clear removes the records and notes of all networks; no plugin may run meanwhile. It keeps the files of other programs, and the VF
// journals, because only they contain the settings to restore.
func Clear() error {
	networks, err := Networks()
	errs := []error{err}
	for _, network := range networks {
		errs = append(errs, store.RemoveAll(folder(network)))
	}
	journals, err := Journaled()
	errs = append(errs, err)
	entries, err := os.ReadDir(store.Root)
	errs = append(errs, ignoreMissing(err))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") && (e.Name() != Journals || len(journals) == 0) {
			errs = append(errs, store.RemoveAll(filepath.Join(store.Root, e.Name())))
		}
	}
	_ = os.Remove(store.Root)
	return errors.Join(errs...)
}
