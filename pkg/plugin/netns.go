// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// openNetns opens CNI_NETNS and refuses, before anything is changed, what is no network namespace or is the plugin's own. For
// DEL such a path counts as "the namespace is gone": what the attachment left elsewhere must still be removed.
func (r *Request) openNetns(getenv func(string) string) error {
	f, err := openNetns(r.NetnsPath)
	if err == nil && isOwn(f) && !override(getenv("CNI_NETNS_OVERRIDE")) {
		f.Close()
		err = errors.New("is the namespace of the plugin itself")
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

// OpenNetns opens a network namespace by a path that is not the request's own. That of the plugin itself is refused.
func OpenNetns(path string) (*os.File, error) {
	f, err := openNetns(path)
	if err == nil && isOwn(f) {
		f.Close()
		return nil, errors.New("is the namespace of the plugin itself")
	}
	return f, err
}

func openNetns(path string) (*os.File, error) {
	// O_NONBLOCK: a FIFO in place of the namespace must not block.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err == nil && st.Type == unix.NSFS_MAGIC {
		if kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE); err == nil && kind == unix.CLONE_NEWNET {
			return os.NewFile(uintptr(fd), path), nil
		}
	}
	unix.Close(fd)
	return nil, fmt.Errorf("is not a network namespace")
}

func isOwn(f *os.File) bool {
	var own, other unix.Stat_t
	if unix.Stat("/proc/self/ns/net", &own) != nil || unix.Fstat(int(f.Fd()), &other) != nil {
		return false
	}
	return own.Dev == other.Dev && own.Ino == other.Ino
}

func override(s string) bool { return s == "1" || strings.EqualFold(s, "true") }
