// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/podresources"
	"github.com/podlace/podlace/pkg/store"
)

// timestampMargin is far above the granularity of the kernel's timestamps of files, 1 to 10 ms.
const timestampMargin = time.Second

// Cache reads the records of a folder and the kubelet's file, and reads again only the files that changed: each ADD and each claim that is
// prepared needs all of them. Both are replaced by new files, so a file's identity, time and size show whether it changed.
type Cache struct {
	folder, kubelet string

	mu      sync.Mutex
	files   []*file     // by UID
	seen    fs.FileInfo // the folder when its files were read, if it cannot have changed unseen since
	damaged []error     // of records that cannot be read
	state   struct {
		info fs.FileInfo
		text string
	}
}

// file is a record as it was last read.
type file struct {
	uid     string
	info    fs.FileInfo
	data    []byte // nil if it could not be read
	decoded bool
	record  Record
	err     error
}

// NewCache returns a cache of a folder, which need not exist, on a node whose kubelet has a root folder; "" if that is not known.
func NewCache(folder, kubelet string) *Cache { return &Cache{folder: folder, kubelet: kubelet} }

// same reports whether a file was neither written nor replaced.
func same(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// names reports whether the record has a text; it need not be decoded for that.
func (f *file) names(text string) bool { return bytes.Contains(f.data, []byte(text)) }

// decode parses the record at the first call: most pods need none.
func (f *file) decode() (Record, error) {
	if !f.decoded && f.err == nil {
		f.record, f.err = decode(f.uid, f.data)
		f.decoded = true
	}
	return f.record, f.err
}

// walk calls take for each record of the folder, by UID, with c locked. It goes on after an error, and returns all errors.
func (c *Cache) walk(take func(*file) error) error {
	errs := []error{c.refresh()}
	for _, f := range c.files {
		errs = append(errs, take(f))
	}
	return errors.Join(errs...)
}

// refresh reads the files of the folder that changed. Writers replace files, which changes the folder: its files are looked at only if it
// has changed, or changed so shortly before the last look that its time could not show another change.
func (c *Cache) refresh() error {
	info, err := os.Stat(c.folder)
	if same(c.seen, info) {
		return nil
	}
	before := c.files
	c.seen, c.files = nil, nil
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	settled := err == nil && time.Since(info.ModTime()) > timestampMargin
	dir, err := store.Open(c.folder)
	if err != nil {
		return err
	}
	defer dir.Close()
	entries, err := os.ReadDir(c.folder)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") { // being written
			continue
		}
		f := read(dir, e, before)
		if errors.Is(f.err, fs.ErrNotExist) {
			continue // removed since
		}
		settled = settled && f.err == nil
		c.files = append(c.files, f)
	}
	if settled && err == nil {
		c.seen = info
	}
	return err
}

// read returns a record of the folder: as it was read before, if it has not changed.
func read(dir *store.Dir, e fs.DirEntry, before []*file) *file {
	info, _ := e.Info()
	i, found := slices.BinarySearchFunc(before, e.Name(), func(f *file, uid string) int { return strings.Compare(f.uid, uid) })
	if found && same(before[i].info, info) {
		return before[i]
	}
	f := &file{uid: e.Name(), info: info}
	if f.data, f.err = dir.Read(f.uid); f.err != nil {
		f.err = fmt.Errorf("record of the claim with UID %s: %w", f.uid, f.err)
	}
	return f
}

// Damaged returns why records cannot be read, by the last List.
func (c *Cache) Damaged() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(c.damaged...)
}

// List returns the records of all claims by UID, with stand-ins for those that cannot be read (Damaged). An error means that the devices of
// some claim are not known. The caller changes nothing in the records.
func (c *Cache) List() (list []Record, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.damaged = nil
	err = c.walk(func(f *file) error {
		r, err := f.decode()
		if err == nil {
			list = append(list, r)
			return nil
		}
		c.damaged = append(c.damaged, err)
		stand, ok := f.standIn(c.kubelet)
		if !ok {
			return err
		}
		if len(stand.Devices) > 0 {
			list = append(list, stand)
		}
		return nil
	})
	return list, err
}

// reservedFor returns the records that were reserved for a pod. Records of other pods are not parsed: there may be many.
func (c *Cache) reservedFor(podUID string) (records []Record, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err = c.walk(func(f *file) error {
		if f.data != nil && !f.names(podUID) {
			return nil
		}
		r, err := f.decode()
		if err == nil && r.reservedFor(podUID) {
			records = append(records, r)
		}
		return err
	})
	return records, err
}

// claims returns the claims of a pod that have devices of this driver, by the kubelet's file. An error means that nothing is known; it is
// fs.ErrNotExist (errors.Is) if the kubelet has prepared no claim yet.
func (c *Cache) claims(podUID string) ([]Note, error) {
	path := stateFile(c.kubelet)
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	if !same(c.state.info, info) {
		c.state.info = nil
		c.state.text, err = readState(path)
	}
	if err == nil {
		c.state.info = info
	}
	text := c.state.text
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	notes, err := parseState(text, podUID)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return notes, nil
}

// readState reads the text within the kubelet's file.
func readState(path string) (string, error) {
	data, err := podresources.ReadRegular(path)
	if err != nil {
		return "", err
	}
	text, err := unwrap(data)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return text, nil
}

// State file of a kubelet with a root folder, such as /var/lib/kubelet.
func stateFile(kubelet string) string { return filepath.Join(kubelet, "dra_manager_state") }
