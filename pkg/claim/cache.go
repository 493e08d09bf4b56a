// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"
)

// Cache reads the records of a folder, and reads only changed files again. The driver needs the records of all claims each time that it
// prepares one. A write replaces the record's file, so the identity, time and size of the file show a change.
type Cache struct {
	folder, kubelet string

	mu      sync.Mutex
	byUID   map[string]cached // by UID
	damaged []error           // errors of unreadable records
}

type cached struct {
	info   fs.FileInfo
	record Record
	err    error
}

// NewCache returns a cache of a folder, which may be missing. kubelet is the root folder of the node's kubelet.
func NewCache(folder, kubelet string) *Cache { return &Cache{folder: folder, kubelet: kubelet} }

// unchanged reports whether the file is unchanged: neither written nor replaced.
func (c cached) unchanged(info fs.FileInfo) bool {
	return c.info != nil && os.SameFile(c.info, info) && c.info.ModTime().Equal(info.ModTime()) && c.info.Size() == info.Size()
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
	files, err := os.ReadDir(c.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.byUID
	c.byUID, c.damaged = map[string]cached{}, nil
	var errs []error
	for _, f := range files {
		if strings.HasPrefix(f.Name(), ".") { // a temporary file
			continue
		}
		info, err := f.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed after ReadDir
		}
		one := before[f.Name()]
		if err != nil || !one.unchanged(info) {
			one = cached{info: info}
			if one.record, one.err = Read(c.folder, f.Name()); errors.Is(one.err, fs.ErrNotExist) {
				continue
			}
		}
		c.byUID[f.Name()] = one
		if one.err == nil {
			list = append(list, one.record)
			continue
		}
		c.damaged = append(c.damaged, one.err)
		list, one.err = addStandIn(list, c.folder, c.kubelet, f.Name(), one.err)
		errs = append(errs, one.err)
	}
	return list, errors.Join(errs...)
}
