// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
)

// collectFiles adds a record for everything below a folder, but not for the folder, so that a missing folder equals an empty one.
func (s *Snapshot) collectFiles(dir string, ignore *regexp.Regexp) error {
	var records []record
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || path == dir && err == nil {
			return nil
		}
		if err != nil {
			return err
		}
		r, err := fileRecord(path, entry)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // deleted meanwhile
		}
		records = append(records, r)
		return err
	})
	s.add(records, ignore)
	return err
}

func fileRecord(path string, entry fs.DirEntry) (record, error) {
	r := record{scope: "host", name: "file " + path}
	if entry.IsDir() {
		r.name = "folder " + path
	}
	info, err := entry.Info()
	if err != nil {
		return r, err
	}
	r.fields = append(r.fields, field{"mode", info.Mode().String()})
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		r.fields = append(r.fields, field{"owner", fmt.Sprintf("%d:%d", stat.Uid, stat.Gid)})
	}
	content, err := contentOf(path, info.Mode())
	if err != nil {
		return r, err
	}
	if content != "" {
		r.fields = append(r.fields, field{"content", content})
	}
	return r, nil
}

// contentOf returns a link's target, or a file's size and hash.
func contentOf(path string, mode fs.FileMode) (string, error) {
	switch {
	case mode&fs.ModeSymlink != 0:
		return os.Readlink(path)
	case mode.IsRegular():
		b, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		sum := sha256.Sum256(b)
		return fmt.Sprintf("%d bytes %s", len(b), hex.EncodeToString(sum[:8])), nil
	}
	return "", nil
}
