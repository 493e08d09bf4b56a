// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"io/fs"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

// openNetns opens the namespace in CNI_NETNS before the CNI operation. It fails if the path is no network namespace, or the plugin's own,
// but never for DEL, which treats such a namespace as missing and removes the rest of the attachment's state.
func (r *Request) openNetns(getenv func(string) string) error {
	f, err := openNetns(r.NetnsPath)
	if err == nil && isOwn(f) && !override(getenv("CNI_NETNS_OVERRIDE")) {
		f.Close()
		err = ownNetns
	}
	switch {
	case err == nil:
		r.Netns = f
		return nil
	case r.Verb == "DEL":
		if r.NetnsPath != "" {
			r.Log.Info("namespace is gone", "reason", err)
		}
		return nil
	}
	return Errorf(CodeNetns, "CNI_NETNS %s: %w", quote(r.NetnsPath), err)
}

// noNetns is the error for a path that is not that of a pod's network namespace. It matches fs.ErrNotExist, because the attachment's
// namespace is missing.
type noNetns string

func (e noNetns) Error() string { return string(e) }

func (e noNetns) Is(target error) bool { return target == fs.ErrNotExist }

const (
	otherFile = noNetns("is not a network namespace")
	ownNetns  = noNetns("is the namespace of the plugin itself")
)

// OpenNetns opens a network namespace by path, but not the plugin's own. The error is fs.ErrNotExist if the path is certainly not that of a
// pod's namespace.
func OpenNetns(path string) (ns.NetNS, error) {
	f, err := openNetns(path)
	if err == nil && isOwn(f) {
		f.Close()
		return nil, ownNetns
	}
	return f, err
}

// openNetns opens a network namespace by path. Unlike ns.GetNS, it refuses other namespaces and other files of procfs.
func openNetns(path string) (ns.NetNS, error) {
	f, err := ns.GetNS(path)
	var missing ns.NSPathNotExistErr
	var other ns.NSPathNotNSErr
	switch {
	case errors.As(err, &missing):
		return nil, unix.ENOENT
	case errors.As(err, &other):
		return nil, otherFile
	case err != nil:
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err == nil && st.Type == unix.NSFS_MAGIC {
		if kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE); err == nil && kind == unix.CLONE_NEWNET {
			return f, nil
		}
	}
	f.Close()
	return nil, otherFile
}

func isOwn(f ns.NetNS) bool {
	var own, other unix.Stat_t
	if unix.Stat("/proc/thread-self/ns/net", &own) != nil || unix.Fstat(int(f.Fd()), &other) != nil {
		return false
	}
	return own.Dev == other.Dev && own.Ino == other.Ino
}

func override(s string) bool { return s == "1" || strings.EqualFold(s, "true") }
