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

// Cache reads the records of a folder and the kubelet's file of claims, and reads only changed files again. Each ADD and each Prepare needs
// all of them. A write replaces the file, so the identity, time and size of the file show a change.
type Cache struct {
	folder, kubelet string

	mu      sync.Mutex
	files   []*file     // by UID
	seen    fs.FileInfo // the folder at the last read, or nil if its time might not show a later change
	damaged []error     // errors of unreadable records
	state   struct {
		info fs.FileInfo
		text string
	}
}

// file is the file of a record at its last read.
type file struct {
	uid     string
	info    fs.FileInfo
	data    []byte // nil if it could not be read
	decoded bool
	record  Record
	err     error
}

// NewCache returns a cache of a folder, which may be missing. kubelet is the root folder of the node's kubelet, or "" if it is unknown.
func NewCache(folder, kubelet string) *Cache { return &Cache{folder: folder, kubelet: kubelet} }

// same reports whether both describe an unchanged file: neither written nor replaced.
func same(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// decode parses the record at the first call, because ADD needs few records.
func (f *file) decode() (Record, error) {
	if !f.decoded && f.err == nil {
		f.record, f.err = decode(f.uid, f.data)
		f.decoded = true
	}
	return f.record, f.err
}

// walk calls take for each record of the folder, sorted by UID. It continues after an error and returns all errors. The caller holds c.mu.
func (c *Cache) walk(take func(*file) error) error {
	errs := []error{c.refresh()}
	for _, f := range c.files {
		errs = append(errs, take(f))
	}
	return errors.Join(errs...)
}

// refresh reads the changed files of the folder. A write replaces a file and so changes the folder. If the folder is unchanged, refresh
// does not look at its files, unless the last change was so close to the last read that the folder's time might hide another one.
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
		if strings.HasPrefix(e.Name(), ".") { // a temporary file
			continue
		}
		f := read(dir, e, before)
		if errors.Is(f.err, fs.ErrNotExist) {
			continue // removed after ReadDir
		}
		settled = settled && f.err == nil
		c.files = append(c.files, f)
	}
	if settled && err == nil {
		c.seen = info
	}
	return err
}

// read returns the file of a record. It returns the former one if the file is unchanged.
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

// Damaged returns the errors of the records that the last List could not read.
func (c *Cache) Damaged() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(c.damaged...)
}

// List returns the records of all claims by UID. A stand-in replaces an unreadable record, whose error Damaged returns. An error means
// that the devices of a claim are unknown. The caller must not change the records.
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

// reservedFor returns the records that are reserved for a pod. It does not parse the records of other pods, because there may be many.
func (c *Cache) reservedFor(podUID string) (records []Record, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err = c.walk(func(f *file) error {
		if f.data != nil && !bytes.Contains(f.data, []byte(podUID)) {
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

// claims returns the claims of a pod with devices of this driver, or those of all pods if podUID is "". Its errors are those of
// KubeletClaims.
func (c *Cache) claims(podUID string) ([]KubeletClaim, error) {
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

// readState returns the JSON within the kubelet's file.
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

// stateFile returns the kubelet's file of claims. kubelet is its root folder, such as /var/lib/kubelet.
func stateFile(kubelet string) string { return filepath.Join(kubelet, "dra_manager_state") }
