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

	"github.com/podlace/podlace/pkg/store"
)

// timestampMargin is the age at which the cache trusts a folder's modification time. A change right after another may leave it the
// same, because the kernel's file timestamps have a granularity of 1 to 10 ms.
const timestampMargin = time.Second

// maxState is the maximum size of the kubelet's file of claims in bytes.
const maxState = 64 << 20

// Cache reads the claim records of a folder and the kubelet's file of claims, all of which each ADD and each Prepare uses. It opens
// only those that have changed, by inode number, modification time or size: every writer replaces the whole file.
type Cache struct {
	folder, kubelet string

	mu      sync.Mutex
	files   []*recordFile // by UID
	seen    fs.FileInfo   // the folder at the last read, or nil if its time might not show a later change
	damaged []error       // errors of unreadable records
	state   struct {
		info fs.FileInfo
		text string
	}
}

// recordFile is a claim record as of the last read.
type recordFile struct {
	uid     string
	info    fs.FileInfo
	data    []byte // nil if it could not be read
	decoded bool
	record  Record
	err     error
}

// NewCache returns a cache for a folder of claim records, which may be missing. kubelet is the root folder of the node's kubelet, or ""
// if unknown.
func NewCache(folder, kubelet string) *Cache { return &Cache{folder: folder, kubelet: kubelet} }

func isSameFile(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// decode parses the record at its first call and not at the read, because an ADD needs only a few of the records.
func (f *recordFile) decode() (Record, error) {
	if !f.decoded && f.err == nil {
		f.record, f.err = decode(f.uid, f.data)
		f.decoded = true
	}
	return f.record, f.err
}

// walkFiles calls take for each record in the folder, in the order of the UIDs. It continues after an error and returns all of them.
// The caller holds c.mu.
func (c *Cache) walkFiles(take func(*recordFile) error) error {
	errs := []error{c.refresh()}
	for _, f := range c.files {
		errs = append(errs, take(f))
	}
	return errors.Join(errs...)
}

// refresh reads the files that have changed. Replacing a file changes the folder's modification time, so nothing is checked while that
// stays the same, except directly after a change (see timestampMargin).
func (c *Cache) refresh() error {
	info, err := os.Stat(c.folder)
	if isSameFile(c.seen, info) {
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
		f := readRecord(dir, e, before)
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

// readRecord reads a claim record, or returns the content from the last read if the file has not changed.
func readRecord(dir *store.Dir, e fs.DirEntry, before []*recordFile) *recordFile {
	info, _ := e.Info()
	i, found := slices.BinarySearchFunc(before, e.Name(), func(f *recordFile, uid string) int { return strings.Compare(f.uid, uid) })
	if found && isSameFile(before[i].info, info) {
		return before[i]
	}
	f := &recordFile{uid: e.Name(), info: info}
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

// List returns the records of all claims, sorted by UID; callers must not change them. An unreadable record has a placeholder with the
// claim's devices, and its error is in Damaged. If those devices are unknown, List fails.
func (c *Cache) List() (list []Record, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.damaged = nil
	err = c.walkFiles(func(f *recordFile) error {
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

// reservedFor returns the records of the claims that are reserved for a pod. It parses no others, because a node may have many.
func (c *Cache) reservedFor(podUID string) (records []Record, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err = c.walkFiles(func(f *recordFile) error {
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

// claimsOf returns the claims with devices of this driver of a pod, or of all pods if podUID is "". Its errors are those of
// KubeletClaims.
func (c *Cache) claimsOf(podUID string) ([]KubeletClaim, error) {
	path := stateFile(c.kubelet)
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	if !isSameFile(c.state.info, info) {
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

// readState returns the JSON text inside the kubelet's file of claims.
func readState(path string) (string, error) {
	data, err := store.ReadSmall(path, maxState, 0)
	if err != nil {
		return "", err
	}
	text, err := unwrap(data)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return text, nil
}

// stateFile returns the path of the kubelet's file of claims below its root folder, such as /var/lib/kubelet.
func stateFile(kubelet string) string { return filepath.Join(kubelet, "dra_manager_state") }
