// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The error contains the path of the obstacle exactly once.
func TestWritable(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Symlink("/nonexistent", link)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		dir: nil, filepath.Join(dir, "missing", "too"): nil,
		file: unix.ENOTDIR, filepath.Join(file, "below"): unix.ENOTDIR,
	} {
		if err := Writable(path); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	for _, path := range []string{file, filepath.Join(link, "below")} {
		var at *fs.PathError
		if err := Writable(path); !errors.As(err, &at) || strings.Count(err.Error(), at.Path) != 1 || !strings.HasPrefix(path, at.Path) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
