// SPDX-License-Identifier: Apache-2.0

// Package store keeps small files below a state folder: atomic writes, exclusive creation with content, locks with a deadline.
// All access goes through os.Root, so that no name and no symbolic link leads out of the folder.
package store

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// tempPrefix begins the names of files that are being written; List leaves them out.
const tempPrefix = ".tmp-"

// maxFile bounds files on reading and on writing: what one version writes, any version can read. A record with 1,000 ports has 130 kB.
const maxFile = 4 << 20

// ErrTooLarge is the error for a file of more than maxFile bytes.
var ErrTooLarge = fmt.Errorf("larger than %d bytes", maxFile)

// Root is the folder of what must not survive a boot; it is on tmpfs (file-hierarchy(7)).
const Root = "/run/podlace"

// Dir is an open state folder.
type Dir struct {
	root *os.Root
	self *os.File // the folder itself
	path string
}

// Open opens the folder path; it must exist (errors.Is fs.ErrNotExist).
func Open(path string) (*Dir, error) {
	if info, err := os.Stat(path); err == nil && !info.IsDir() { // a FIFO would block
		return nil, &fs.PathError{Op: "open", Path: path, Err: unix.ENOTDIR}
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	d := &Dir{root: root, path: path}
	if d.self, err = root.Open("."); err != nil {
		root.Close()
		return nil, d.named(err)
	}
	return d, nil
}

// named puts the folder's path into an error of os.Root, which knows names within the folder only.
func (d *Dir) named(err error) error {
	var one *fs.PathError
	if errors.As(err, &one) {
		return &fs.PathError{Op: one.Op, Path: filepath.Join(d.path, one.Path), Err: one.Err}
	}
	var two *os.LinkError
	if errors.As(err, &two) {
		return &os.LinkError{Op: two.Op, Old: filepath.Join(d.path, two.Old), New: filepath.Join(d.path, two.New), Err: two.Err}
	}
	return err
}

// Make opens the folder path and makes it with all its parents when it is missing.
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

// RemoveAll deletes the folder path with all that is in it; one that is not there is no error.
func RemoveAll(path string) error {
	if err := fault.Point("remove " + path); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// Close releases the folder, not its locks.
func (d *Dir) Close() error { return errors.Join(d.self.Close(), d.root.Close()) }

// Path returns the path that the folder was opened with.
func (d *Dir) Path() string { return d.path }

// Modified returns when the folder was last modified: nanoseconds since 1970.
func (d *Dir) Modified() (int64, error) {
	info, err := d.self.Stat()
	if err != nil {
		return 0, err
	}
	return info.ModTime().UnixNano(), nil
}

// Written returns when the file name was last written.
func (d *Dir) Written(name string) (time.Time, error) {
	info, err := d.root.Lstat(name)
	if err != nil {
		return time.Time{}, d.named(err)
	}
	return info.ModTime(), nil
}

// SetWritten changes what Written returns.
func (d *Dir) SetWritten(name string, at time.Time) error {
	fault.Step("set time of", name)
	return d.named(d.root.Chtimes(name, time.Time{}, at))
}

// Stamp sets the folder's time of modification to now and returns what Modified returns from then on. Kernels before 6.13 take the time
// of a change from their last tick, so that two changes within some milliseconds have the same; a stamp has one that no tick has.
func (d *Dir) Stamp() (int64, error) {
	fault.Step("stamp", d.path)
	now := unix.NsecToTimespec(time.Now().UnixNano())
	err := unix.UtimesNanoAt(int(d.self.Fd()), ".", []unix.Timespec{{Nsec: unix.UTIME_OMIT}, now}, 0)
	if err != nil && !errors.Is(err, unix.EPERM) { // the folder of another user keeps its time
		return 0, &fs.PathError{Op: "stamp", Path: d.path, Err: err}
	}
	return d.Modified()
}

// Move moves the file name of this folder to another, under the same name, over what may be there.
func (d *Dir) Move(name string, to *Dir) error {
	if err := fault.Point("move " + filepath.Join(d.path, name)); err != nil {
		return err
	}
	if err := unix.Renameat(int(d.self.Fd()), name, int(to.self.Fd()), name); err != nil {
		return &os.LinkError{Op: "rename", Old: filepath.Join(d.path, name), New: filepath.Join(to.path, name), Err: err}
	}
	return nil
}

// Read returns the content of the file name, of at most maxFile bytes.
func (d *Dir) Read(name string) ([]byte, error) {
	f, err := d.openFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return d.content(f, name)
}

// ReadWritten is Read and Written of the same file.
func (d *Dir) ReadWritten(name string) ([]byte, time.Time, error) {
	f, err := d.openFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, time.Time{}, d.named(err)
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

// Write puts data under name in one step: a reader sees the old content or the new, never a part. Two writers of one name must
// exclude each other by a lock.
func (d *Dir) Write(name string, data []byte, mode fs.FileMode) error {
	return d.write(name, data, mode, func(*os.File) error { return nil })
}

// WriteSync is Write that returns when the data is where a crash of the kernel leaves it, if the folder is on a disk.
func (d *Dir) WriteSync(name string, data []byte, mode fs.FileMode) error {
	if err := d.write(name, data, mode, (*os.File).Sync); err != nil {
		return err
	}
	return d.named(d.self.Sync())
}

// fits refuses what Read would refuse.
func (d *Dir) fits(name string, data []byte) error {
	if len(data) > maxFile {
		return fmt.Errorf("write %s: %w", filepath.Join(d.path, name), ErrTooLarge)
	}
	return nil
}

// CopySync is WriteSync for a program: of any size, and with exactly this mode.
func (d *Dir) CopySync(name string, from io.Reader, mode fs.FileMode) error {
	err := d.put(name, mode, func(f *os.File) error {
		_, err := io.Copy(f, from)
		return errors.Join(err, f.Chmod(mode), f.Sync())
	})
	if err != nil {
		return err
	}
	return d.named(d.self.Sync())
}

// Rename gives the file name another name in the folder, over what may be there, and returns when that is on the disk.
func (d *Dir) Rename(name, to string) error {
	if err := fault.Point("rename " + filepath.Join(d.path, name) + " to " + to); err != nil {
		return err
	}
	if err := d.root.Rename(name, to); err != nil {
		return d.named(err)
	}
	return d.named(d.self.Sync())
}

func (d *Dir) write(name string, data []byte, mode fs.FileMode, sync func(*os.File) error) error {
	if err := d.fits(name, data); err != nil {
		return err
	}
	return d.put(name, mode, func(f *os.File) error {
		if _, err := f.Write(data); err != nil {
			return err
		}
		return sync(f)
	})
}

// put lets fill write a file that takes the place of the file name.
func (d *Dir) put(name string, mode fs.FileMode, fill func(*os.File) error) error {
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
		err = d.hint(name, d.named(d.root.Rename(temp, name)))
	}
	if err != nil {
		_ = d.root.Remove(temp)
	}
	return err
}

// Overwrite writes data over the file name, and replaces a FIFO or the like. A process that is killed meanwhile leaves an empty file, or a
// part.
func (d *Dir) Overwrite(name string, data []byte, mode fs.FileMode) error {
	if err := d.fits(name, data); err != nil {
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

// Create is Write for a name that must not exist yet (errors.Is fs.ErrExist). Content and exclusiveness come in one step, by link(2)
// of a file that has no name before: whoever is killed in between leaves nothing.
func (d *Dir) Create(name string, data []byte, mode fs.FileMode) error {
	if err := d.fits(name, data); err != nil {
		return err
	}
	path := filepath.Join(d.path, name)
	if err := fault.Point("create " + path); err != nil {
		return err
	}
	if !fs.ValidPath(name) || strings.Contains(name, "/") {
		return &fs.PathError{Op: "create", Path: path, Err: fs.ErrInvalid}
	}
	fd, err := unix.Openat(int(d.self.Fd()), ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, uint32(mode))
	if errors.Is(err, unix.EOPNOTSUPP) {
		return d.createNamed(name, data, mode)
	}
	if err != nil {
		return &fs.PathError{Op: "create", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), int(d.self.Fd()), name, unix.AT_SYMLINK_FOLLOW); err != nil {
		return &fs.PathError{Op: "link", Path: path, Err: err}
	}
	return nil
}

// createNamed serves file systems without O_TMPFILE.
func (d *Dir) createNamed(name string, data []byte, mode fs.FileMode) error {
	var random [8]byte
	_, _ = rand.Read(random[:])
	temp := tempPrefix + hex.EncodeToString(random[:])
	f, err := d.openFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = d.named(d.root.Link(temp, name))
	}
	return errors.Join(err, d.named(d.root.Remove(temp)))
}

// Remove deletes the file name; a file that is not there is no error.
func (d *Dir) Remove(name string) error {
	if err := fault.Point("remove " + filepath.Join(d.path, name)); err != nil {
		return err
	}
	err := d.root.Remove(name)
	if temp := d.root.Remove(tempPrefix + name); temp == nil {
		// A writer of this name was killed.
		slog.Debug("removed an unfinished file", "folder", d.path, "name", name)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return d.named(err)
	}
	return nil
}

// List returns the names of the files, without the temporary files of writers that were killed, which it removes once they are
// a minute old.
func (d *Dir) List() ([]string, error) {
	f, err := d.root.Open(".")
	if err != nil {
		return nil, d.named(err)
	}
	defer f.Close()
	all, err := f.Readdirnames(-1)
	names := all[:0]
	for _, name := range all {
		if strings.HasPrefix(name, tempPrefix) {
			d.removeStale(name)
			continue
		}
		names = append(names, name)
	}
	return names, err
}

func (d *Dir) removeStale(name string) {
	if info, err := d.root.Lstat(name); err == nil && time.Since(info.ModTime()).Abs() > time.Minute {
		_ = d.root.Remove(name)
	}
}
