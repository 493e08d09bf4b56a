// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Sysfs is where Linux mounts sysfs. All functions take it as a parameter, so that tests can use another tree.
const Sysfs = "/sys"

// Folders and files below it.
const (
	devicesFolder = "bus/pci/devices"
	driversFolder = "bus/pci/drivers"
	probeFile     = "bus/pci/drivers_probe"
	groupsFolder  = "kernel/iommu_groups"
	nodesFolder   = "devices/system/node"
	miscFolder    = "class/misc"
)

// maxAttribute is one page, the maximum size of an attribute.
const maxAttribute = 4096

// Errors of a tree that is no sysfs.
var (
	errNoFile = errors.New("is no regular file")
	errLong   = fmt.Errorf("is longer than %d bytes", maxAttribute)
	errLink   = errors.New("leads to an unexpected folder")
)

// isUnavailable reports whether an error only means that the kernel or driver has no value, or none at the moment, such as EINVAL for the
// speed of a link that is down. Any other error of an existing file is a real one.
func isUnavailable(err error) bool {
	return isMissing(err) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EOPNOTSUPP)
}

// isMissing reports whether an error means that the device disappeared while it was read.
func isMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV)
}

// readAttribute returns a file without surrounding white space. It does not block on a FIFO.
func readAttribute(dir *os.Root, name string) (string, error) {
	f, err := dir.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", errNoFile
	}
	buffer := make([]byte, maxAttribute+1)
	n, err := io.ReadFull(f, buffer)
	if err == nil {
		return "", errLong
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return "", err
	}
	return strings.TrimSpace(string(buffer[:n])), nil
}

// writeAttribute writes to an existing file. The kernel ignores a line end.
func writeAttribute(dir *os.Root, name, value string) error {
	f, err := dir.OpenFile(name, os.O_WRONLY|os.O_TRUNC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value + "\n")
	return errors.Join(err, f.Close())
}

// listFolder returns the names in a folder, sorted.
func listFolder(dir *os.Root, name string) ([]string, error) {
	f, err := dir.OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// readLink returns the last element of a symlink's target, which must be in the folder for this kind of link ("" for any).
func readLink(dir *os.Root, name, folder string) (string, error) {
	target, err := dir.Readlink(name)
	if errors.Is(err, syscall.EINVAL) {
		return "", errLink // it is not a symlink
	}
	if err != nil {
		return "", err
	}
	last := path.Base(target)
	if folder != "" && path.Base(path.Dir(target)) != folder || last == "." || last == ".." || last == "/" {
		return "", errLink
	}
	return last, nil
}

// folder has the content of one function's or interface's folder. It keeps the first read error.
type folder struct {
	*os.Root
	names []string // names in the folder, sorted
	err   error
	left  bool // a file has disappeared
}

func openFolder(parent *os.Root, name string) (*folder, error) {
	// The dot makes this fail for anything but a folder; without it OpenRoot would block on a FIFO.
	dir, err := parent.OpenRoot(name + "/.")
	if err != nil {
		return nil, err
	}
	names, err := listFolder(dir, ".")
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &folder{Root: dir, names: names}, nil
}

func (f *folder) has(name string) bool {
	_, found := slices.BinarySearch(f.names, name)
	return found
}

// fail keeps an error with its reason only, because paths differ between machines.
func (f *folder) fail(name string, err error) {
	f.left = f.left || isMissing(err)
	if f.err == nil && err != nil && !isUnavailable(err) {
		var at *fs.PathError
		if errors.As(err, &at) {
			err = at.Err
		}
		f.err = fmt.Errorf("%s: %w", name, err)
	}
}

// text returns an attribute, or "".
func (f *folder) text(name string) string {
	if !f.has(name) {
		return ""
	}
	value, err := readAttribute(f.Root, name)
	if err == nil {
		err = checkWord(value)
	}
	if err != nil {
		f.fail(name, err)
		return ""
	}
	return value
}

// value parses an attribute. It returns otherwise if the attribute is missing or invalid.
func value[T any](f *folder, name string, otherwise T, parse func(string) (T, error)) T {
	if !f.has(name) {
		return otherwise
	}
	text, err := readAttribute(f.Root, name)
	if err == nil {
		var v T
		if v, err = parse(text); err == nil {
			return v
		}
	}
	f.fail(name, err)
	return otherwise
}

// link returns the target of a symlink, or "".
func (f *folder) link(name, in string) string {
	if !f.has(name) {
		return ""
	}
	last, err := readLink(f.Root, name, in)
	if err == nil {
		err = checkWord(last)
	}
	if err != nil {
		f.fail(name, err)
		return ""
	}
	return last
}

// function returns the address of the function that a symlink leads to.
func (f *folder) function(name string) Address {
	text := f.link(name, "")
	if text == "" {
		return Address{}
	}
	a, err := ParseAddress(text)
	f.fail(name, err)
	return a
}

// list returns the names in a subfolder, or nil.
func (f *folder) list(name string) []string {
	if !f.has(name) {
		return nil
	}
	names, err := listFolder(f.Root, name)
	f.fail(name, err)
	return names
}
