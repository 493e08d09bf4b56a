// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"
)

// Cache reads the records of a folder, and reads again only the files that changed: each claim that is prepared needs the records of all
// others. A record is replaced by a new file, so the file's identity, time and size tell whether it changed.
type Cache struct {
	folder, kubelet string

	mu      sync.Mutex
	of      map[string]cached // by UID
	damaged []error           // of records that cannot be read
}

type cached struct {
	info   fs.FileInfo
	record Record
	err    error
}

// NewCache returns a cache of a folder, which need not exist, on a node whose kubelet has a root folder.
func NewCache(folder, kubelet string) *Cache { return &Cache{folder: folder, kubelet: kubelet} }

// same reports whether a file was neither written nor replaced.
func (c cached) same(info fs.FileInfo) bool {
	return c.info != nil && os.SameFile(c.info, info) && c.info.ModTime().Equal(info.ModTime()) && c.info.Size() == info.Size()
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
	files, err := os.ReadDir(c.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.of
	c.of, c.damaged = map[string]cached{}, nil
	var errs []error
	for _, f := range files {
		if strings.HasPrefix(f.Name(), ".") { // being written
			continue
		}
		info, err := f.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		one := before[f.Name()]
		if err != nil || !one.same(info) {
			one = cached{info: info}
			if one.record, one.err = Read(c.folder, f.Name()); errors.Is(one.err, fs.ErrNotExist) {
				continue
			}
		}
		c.of[f.Name()] = one
		if one.err == nil {
			list = append(list, one.record)
			continue
		}
		c.damaged = append(c.damaged, one.err)
		list, one.err = hold(list, c.folder, c.kubelet, f.Name(), one.err)
		errs = append(errs, one.err)
	}
	return list, errors.Join(errs...)
}
