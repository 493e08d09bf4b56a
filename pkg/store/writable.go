// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// Restrict takes the right to write in a folder from all but its owner, because the files decide what DEL removes.
func Restrict(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm()&0o022 == 0 {
		return err
	}
	mode := info.Mode().Perm() &^ 0o022
	slog.Warn("other users could write in the folder of the records", "folder", path, "mode", info.Mode().Perm(), "new", mode)
	return fault.Change(fmt.Sprintf("chmod %o %s", mode, path), func() error { return os.Chmod(path, mode) })
}

// Writable returns an error if no file can be created in a folder, or if the folder is missing and cannot be created. The error contains
// the path of the folder, or of the parent that is the problem.
func Writable(dir string) error {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) && filepath.Dir(dir) != dir {
		if _, err := os.Lstat(dir); err == nil {
			return &fs.PathError{Op: "stat", Path: dir, Err: errors.New("is a symbolic link to nothing")}
		}
		return Writable(filepath.Dir(dir))
	}
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return &fs.PathError{Op: "access", Path: dir, Err: unix.ENOTDIR}
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return &fs.PathError{Op: "access", Path: dir, Err: err}
	}
	return nil
}
