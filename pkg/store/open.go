// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/plugin"
)

// ErrIrregular means that a FIFO, a socket, a device or a symbolic link is in place of a file. For a folder, the error is unix.EISDIR.
var ErrIrregular = errors.New("not a regular file")

// irregularHint adds a hint to an error that a folder or other irregular file in place of the expected one causes.
func (d *Dir) irregularHint(name string, err error) error {
	switch path := filepath.Join(d.path, name); {
	case errors.Is(err, unix.EISDIR):
		return plugin.WithHint(err, "a folder is where a file should be; remove it: rm -r '%s'", path)
	case errors.Is(err, ErrIrregular):
		return plugin.WithHint(err, "a FIFO, a socket, a device or a symbolic link is where a file should be; remove it: rm '%s'", path)
	}
	return err
}

// openFile opens a file in this folder. It never blocks, follows no symbolic link, and refuses a file that is not regular.
func (d *Dir) openFile(name string, flag int, mode fs.FileMode) (*os.File, error) {
	fd := -1
	err := d.at("open", name, func(dir int) (err error) {
		fd, err = unix.Openat(dir, name, flag|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_NOCTTY|unix.O_CLOEXEC, uint32(mode))
		switch {
		case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV): // a symbolic link; a FIFO or a socket; a device
			return ErrIrregular
		case err != nil:
			return err
		}
		if err = mustBeRegular(fd); err != nil {
			unix.Close(fd)
		}
		return err
	})
	if err != nil {
		return nil, d.irregularHint(name, err)
	}
	return os.NewFile(uintptr(fd), filepath.Join(d.path, name)), nil
}

func mustBeRegular(fd int) error {
	var info unix.Stat_t
	if err := unix.Fstat(fd, &info); err != nil {
		return err
	}
	switch info.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return unix.EISDIR
	}
	return ErrIrregular
}

// create replaces a file in the folder with a new, empty file, which it returns open.
func (d *Dir) create(name string, mode fs.FileMode) (*os.File, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	f, err := d.openFile(name, flags, mode)
	if !errors.Is(err, fs.ErrExist) {
		return f, err
	}
	if err := os.RemoveAll(filepath.Join(d.path, name)); err != nil {
		return nil, err
	}
	return d.openFile(name, flags, mode)
}

// OpenRead opens a file or a folder for reading, with additional flags for open(2). Unlike os.Open, it does not find out whether the kernel
// can poll the file, which takes five system calls.
func OpenRead(path string, flags int) (*os.File, error) {
	fd, err := -1, error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|flags, 0)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Names returns at most so many names in a folder, or all if most is less than 1.
func Names(path string, most int) ([]string, error) {
	f, err := OpenRead(path, unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(most)
	return names, fault.Ignore(err, io.EOF)
}

// ReadFile is ReadSmall with the limit of maxFile bytes. It follows symbolic links.
func ReadFile(path string) ([]byte, error) { return ReadSmall(path, maxFile, 0) }

// ReadSmall returns the content of a regular file, or an error if it has more than most bytes. flags are additional ones for open(2).
func ReadSmall(path string, most int64, flags int) ([]byte, error) {
	f, err := OpenRead(path, unix.O_NONBLOCK|flags) // a FIFO must not block
	if errors.Is(err, unix.ELOOP) && flags&unix.O_NOFOLLOW != 0 {
		return nil, fmt.Errorf("%q is a symbolic link: want a regular file", path)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%q: want a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("%q: larger than %d bytes", path, most)
	}
	return data, err
}
