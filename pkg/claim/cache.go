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
	folder string

	mu sync.Mutex
	of map[string]cached // by UID
}

type cached struct {
	info   fs.FileInfo
	record Record
	err    error
}

// NewCache returns a cache of a folder, which need not exist.
func NewCache(folder string) *Cache { return &Cache{folder: folder} }

// same reports whether a file was neither written nor replaced.
func (c cached) same(info fs.FileInfo) bool {
	return c.info != nil && os.SameFile(c.info, info) && c.info.ModTime().Equal(info.ModTime()) && c.info.Size() == info.Size()
}

// List returns the records of all claims by UID, and why others cannot be read. The caller changes nothing in them.
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
	c.of = map[string]cached{}
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
		if errs = append(errs, one.err); one.err == nil {
			list = append(list, one.record)
		}
	}
	return list, errors.Join(errs...)
}
