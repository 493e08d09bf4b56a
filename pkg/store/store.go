// SPDX-License-Identifier: Apache-2.0

// Package store stores small files in a state folder: it writes them atomically, creates them exclusively with their content, and has locks
// with a deadline. A name has no slash, and no symbolic link with such a name is followed, so no access leads out of the folder.
package store

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// tempPrefix begins the names of files that are being written, which List leaves out.
const tempPrefix = ".tmp-"

// maxFile is the maximum size of a file in bytes, for reading and writing. It is the same in all versions, so each can read the files of
// any other. For comparison, a record with 1,000 ports has 130 kB.
const maxFile = 4 << 20

// ErrTooLarge is the error for a file that has more than maxFile bytes.
var ErrTooLarge = fmt.Errorf("larger than %d bytes", maxFile)

// Root is the folder for state that must not survive a reboot of the node. It is on tmpfs (file-hierarchy(7)).
const Root = "/run/podlace"

// Dir is a state folder that is open.
type Dir struct {
	self *os.File
	path string
}

// Open opens the folder at path. If it is missing, the error matches fs.ErrNotExist.
func Open(path string) (*Dir, error) {
	f, err := OpenRead(path, unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	return &Dir{f, path}, nil
}

// at calls a function with the descriptor of the folder, for a file in it, until no signal interrupts the call.
func (d *Dir) at(op, name string, call func(dir int) error) error {
	path, err := filepath.Join(d.path, name), error(unix.EINTR)
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		err = fs.ErrInvalid
	}
	for errors.Is(err, unix.EINTR) {
		err = call(int(d.self.Fd()))
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}

// Make opens the folder at path, and creates it and its parents if they are missing.
func Make(path string, mode fs.FileMode) (*Dir, error) {
	d, err := Open(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return d, err
	}
	if err := fault.Point("mkdir " + path); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(path, mode); err != nil {
		return nil, err
	}
	return Open(path)
}

// RemoveAll deletes the folder at path with its content. It is a no-op if the folder is missing.
func RemoveAll(path string) error {
	if err := fault.Point("remove " + path); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// Close closes the folder. It does not release locks in the folder.
func (d *Dir) Close() error { return d.self.Close() }

// Path returns the path that was passed to Open or Make.
func (d *Dir) Path() string { return d.path }

// Written returns the modification time of a file in the folder.
func (d *Dir) Written(name string) (time.Time, error) {
	var info unix.Stat_t
	err := d.at("stat", name, func(dir int) error { return unix.Fstatat(dir, name, &info, unix.AT_SYMLINK_NOFOLLOW) })
	return time.Unix(info.Mtim.Unix()), err
}

// SetWritten sets the modification time of a file in the folder.
func (d *Dir) SetWritten(name string, at time.Time) error {
	fault.Step("set time of", name)
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, unix.NsecToTimespec(at.UnixNano())}
	return d.at("set time of", name, func(dir int) error { return unix.UtimesNanoAt(dir, name, times, unix.AT_SYMLINK_NOFOLLOW) })
}

// Read returns the content of a file in the folder, or an error if it has more than maxFile bytes.
func (d *Dir) Read(name string) ([]byte, error) {
	f, err := d.openFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return d.content(f, name)
}

// ReadWritten returns the content and the modification time of one version of a file, even if another process replaces the file during the
// call.
func (d *Dir) ReadWritten(name string) ([]byte, time.Time, error) {
	f, err := d.openFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, time.Time{}, err
	}
	data, err := d.content(f, name)
	return data, info.ModTime(), err
}

func (d *Dir) content(f *os.File, name string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("read %s: %w", filepath.Join(d.path, name), ErrTooLarge)
	}
	if err != nil {
		return nil, err
	}
	return data, nil
}

// Write replaces a file in the folder atomically: a reader sees the old content or the new, never a mixture. If several processes may write
// the same file, the caller must hold a lock.
func (d *Dir) Write(name string, data []byte, mode fs.FileMode) error {
	return d.write(name, data, mode, func(*os.File) error { return nil })
}

// WriteSync is like Write, but waits until the data is on the disk and survives a crash of the kernel.
func (d *Dir) WriteSync(name string, data []byte, mode fs.FileMode) error {
	if err := d.write(name, data, mode, (*os.File).Sync); err != nil {
		return err
	}
	return d.self.Sync()
}

// checkSize returns an error for content that is too large for Read.
func (d *Dir) checkSize(name string, data []byte) error {
	if len(data) > maxFile {
		return fmt.Errorf("write %s: %w", filepath.Join(d.path, name), ErrTooLarge)
	}
	return nil
}

// CopySync is like WriteSync, but copies content of any size from a reader. The file gets exactly this mode, regardless of the umask.
func (d *Dir) CopySync(name string, from io.Reader, mode fs.FileMode) error {
	err := d.replaceFile(name, mode, func(f *os.File) error {
		_, err := io.Copy(f, from)
		return errors.Join(err, f.Chmod(mode), f.Sync())
	})
	if err != nil {
		return err
	}
	return d.self.Sync()
}

// Rename renames a file within the folder, and replaces an existing file. It returns when the change is on the disk.
func (d *Dir) Rename(name, to string) error {
	if err := fault.Point("rename " + filepath.Join(d.path, name) + " to " + to); err != nil {
		return err
	}
	if err := d.rename(name, to); err != nil {
		return err
	}
	return d.self.Sync()
}

func (d *Dir) rename(name, to string) error {
	return d.at("rename", to, func(dir int) error { return unix.Renameat(dir, name, dir, to) })
}

// unlink deletes a file or an empty folder.
func (d *Dir) unlink(name string) error {
	return d.at("remove", name, func(dir int) error {
		err := unix.Unlinkat(dir, name, 0)
		if errors.Is(err, unix.EISDIR) {
			err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		}
		return err
	})
}

func (d *Dir) write(name string, data []byte, mode fs.FileMode, sync func(*os.File) error) error {
	if err := d.checkSize(name, data); err != nil {
		return err
	}
	return d.replaceFile(name, mode, func(f *os.File) error {
		if _, err := f.Write(data); err != nil {
			return err
		}
		return sync(f)
	})
}

// replaceFile creates a temporary file, which fill writes, and renames it over the given name.
func (d *Dir) replaceFile(name string, mode fs.FileMode, fill func(*os.File) error) error {
	if err := fault.Point("write " + filepath.Join(d.path, name)); err != nil {
		return err
	}
	temp := tempPrefix + name
	f, err := d.create(temp, mode)
	if err != nil {
		return err
	}
	err = fill(f)
	if err = errors.Join(err, f.Close()); err == nil {
		fault.Step("rename", temp)
		err = d.irregularHint(name, d.rename(temp, name))
	}
	if err != nil {
		_ = d.unlink(temp)
	}
	return err
}

// Overwrite writes data to a file in place. It creates a missing file, and replaces one that is not regular. A kill during the write
// leaves the file empty or incomplete. An atomic replace would leave a temporary file instead, which nobody removes.
func (d *Dir) Overwrite(name string, data []byte, mode fs.FileMode) error {
	if err := d.checkSize(name, data); err != nil {
		return err
	}
	if err := fault.Point("overwrite " + filepath.Join(d.path, name)); err != nil {
		return err
	}
	f, err := d.openFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if errors.Is(err, ErrIrregular) {
		f, err = d.create(name, mode)
	}
	if err != nil {
		return err
	}
	fault.Step("fill", name)
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// Create is like Write, but if the file exists, it returns an error that matches fs.ErrExist. It names an unnamed file with link(2), so
// that the file and its content appear in one step, and a kill leaves no incomplete file.
func (d *Dir) Create(name string, data []byte, mode fs.FileMode) error {
	if err := d.checkSize(name, data); err != nil {
		return err
	}
	path := filepath.Join(d.path, name)
	if err := fault.Point("create " + path); err != nil {
		return err
	}
	fd := -1
	err := d.at("create", name, func(dir int) (err error) {
		fd, err = unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, uint32(mode))
		return err
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return d.createNamed(name, data, mode)
	}
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return err
	}
	return d.at("link", name, func(dir int) error {
		return unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), dir, name, unix.AT_SYMLINK_FOLLOW)
	})
}

// createNamed is Create for file systems without O_TMPFILE.
func (d *Dir) createNamed(name string, data []byte, mode fs.FileMode) error {
	d.removeStale()
	temp := tempPrefix + rand.Text()
	f, err := d.openFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = d.at("link", name, func(dir int) error { return unix.Linkat(dir, temp, dir, name, 0) })
	}
	return errors.Join(err, d.unlink(temp))
}

// Remove deletes the file with the given name. It is a no-op if the file is missing.
func (d *Dir) Remove(name string) error {
	if err := fault.Point("remove " + filepath.Join(d.path, name)); err != nil {
		return err
	}
	err := d.unlink(name)
	if temp := d.unlink(tempPrefix + name); temp == nil {
		// A killed process has left this temporary file.
		slog.Debug("removed an unfinished file", "folder", d.path, "name", name)
	}
	return fault.Ignore(err, fs.ErrNotExist)
}

// List returns the names of the files in the folder, but no temporary files.
func (d *Dir) List() ([]string, error) {
	names, err := Names(d.path, 0)
	return slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, tempPrefix) }), err
}

// removeStale removes temporary files that are older than a minute, because only killed processes leave them.
func (d *Dir) removeStale() {
	names, _ := Names(d.path, 0)
	for _, name := range names {
		if !strings.HasPrefix(name, tempPrefix) {
			continue
		}
		if at, err := d.Written(name); err == nil && time.Since(at).Abs() > time.Minute {
			_ = d.unlink(name)
		}
	}
}
