// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"

	"github.com/podlace/podlace/pkg/claim"
)

// recordCache keeps what records say while their files stay the same: each claim that is prepared looks at the records of all others.
type recordCache struct {
	mu sync.Mutex
	of map[string]cachedRecord // by UID
}

type cachedRecord struct {
	info   fs.FileInfo
	record claim.Record
	err    error
}

// same reports whether a file was neither written nor replaced.
func (c cachedRecord) same(info fs.FileInfo) bool {
	return c.info != nil && os.SameFile(c.info, info) && c.info.ModTime().Equal(info.ModTime()) && c.info.Size() == info.Size()
}

// records returns the records of all claims, and why others cannot be read. The receiver changes nothing in them.
func (d *Driver) records() (list []claim.Record, err error) {
	files, err := os.ReadDir(d.options.Claims)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	d.cache.mu.Lock()
	defer d.cache.mu.Unlock()
	before := d.cache.of
	d.cache.of = map[string]cachedRecord{}
	var errs []error
	for _, f := range files {
		if strings.HasPrefix(f.Name(), ".") { // being written
			continue
		}
		info, err := f.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		c := before[f.Name()]
		if err != nil || !c.same(info) {
			c = cachedRecord{info: info}
			if c.record, c.err = claim.Read(d.options.Claims, f.Name()); errors.Is(c.err, fs.ErrNotExist) {
				continue
			}
		}
		d.cache.of[f.Name()] = c
		if errs = append(errs, c.err); c.err == nil {
			list = append(list, c.record)
		}
	}
	return list, errors.Join(errs...)
}
