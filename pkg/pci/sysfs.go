// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Sysfs is where Linux normally mounts sysfs. Functions take the path as a parameter for tests.
const Sysfs = "/sys"

// Paths relative to sysfs.
const (
	devicesFolder = "bus/pci/devices"
	driversFolder = "bus/pci/drivers"
	probeFile     = "bus/pci/drivers_probe"
	groupsFolder  = "kernel/iommu_groups"
	nodesFolder   = "devices/system/node"
	miscFolder    = "class/misc"
	sharedRDMA    = "module/ib_core/parameters/netns_mode"
)

var errLink = errors.New("leads to an unexpected folder")

// isUnavailable reports whether an error only means that the kernel or driver has no value at present, such as EINVAL for the speed of
// a link that is down. Any other error of an existing file is a real read error.
func isUnavailable(err error) bool {
	return isMissing(err) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EOPNOTSUPP)
}

// isMissing reports whether the file does not exist or the device has disappeared.
func isMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV)
}

// readAttribute returns the content of a file without surrounding white space.
func readAttribute(dir *os.Root, name string) (string, error) {
	data, err := dir.ReadFile(name)
	return strings.TrimSpace(string(data)), err
}

// writeAttribute writes a value to an existing file, with a newline that the kernel ignores.
func writeAttribute(dir *os.Root, name, value string) error {
	f, err := dir.OpenFile(name, os.O_WRONLY|os.O_TRUNC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value + "\n")
	return errors.Join(err, f.Close())
}

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

// readLink returns the last element of a symlink's target, which must be in a folder of the given name unless `folder` is "".
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

// folder is the open sysfs folder of one PCI function or interface, with the first read error.
type folder struct {
	*os.Root
	names []string // names in the folder, sorted
	err   error
	left  bool // a file has disappeared
}

func openFolder(parent *os.Root, name string) (*folder, error) {
	// With the suffix "/.", OpenRoot fails on anything but a folder, while it would block on a FIFO.
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

// noteError keeps the first real error, without its path, because paths differ between machines.
func (f *folder) noteError(name string, err error) {
	f.left = f.left || isMissing(err)
	if f.err == nil && err != nil && !isUnavailable(err) {
		var at *fs.PathError
		if errors.As(err, &at) {
			err = at.Err
		}
		f.err = fmt.Errorf("%s: %w", name, err)
	}
}

// text returns the value of an attribute, or "" if it is missing or not a single word.
func (f *folder) text(name string) string {
	return parseAttribute(f, name, "", parseWord)
}

// parseAttribute reads and parses an attribute, or returns `otherwise` if it is missing or invalid.
func parseAttribute[T any](f *folder, name string, otherwise T, parse func(string) (T, error)) T {
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
	f.noteError(name, err)
	return otherwise
}

// linkTarget returns the last element of a symlink's target, or "" if the symlink is missing or invalid.
func (f *folder) linkTarget(name, in string) string {
	if !f.has(name) {
		return ""
	}
	last, err := readLink(f.Root, name, in)
	if err == nil {
		last, err = parseWord(last)
	}
	f.noteError(name, err)
	return last
}

// linkedFunction returns the address of the function to which a symlink leads, or the zero value if the symlink is missing or invalid.
func (f *folder) linkedFunction(name string) Address {
	var a Address
	f.noteError(name, a.UnmarshalText([]byte(f.linkTarget(name, ""))))
	return a
}

// listNames returns the names in a subfolder, or nil if it is missing.
func (f *folder) listNames(name string) []string {
	if !f.has(name) {
		return nil
	}
	names, err := listFolder(f.Root, name)
	f.noteError(name, err)
	return names
}
