// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/store"
)

// Sysctl is a setting below /proc/sys/net.
type Sysctl struct {
	Path  string // such as "ipv6/conf/eth0/accept_ra"
	Value string
}

const sysctlRoot = "/proc/sys/net"

// mountedSysctls is where the manifest of podlace-node mounts the node's /proc/sys/net, which is read-only in a container.
const mountedSysctls = "/host/proc/sys/net"

// Set writes each setting whose value differs. It skips those that the kernel does not have, such as IPv6 settings without IPv6.
func (n *NS) Set(settings ...Sysctl) error {
	return n.inNamespace(func() error {
		for _, s := range settings {
			if err := n.set(s); err != nil {
				return err
			}
		}
		return nil
	})
}

// Get returns the value of a setting, or fs.ErrNotExist if the kernel does not have it.
func (n *NS) Get(path string) (value string, err error) {
	err = n.inNamespace(func() error {
		f, err := n.openSysctl(path, os.O_RDONLY)
		if err != nil {
			return err
		}
		defer f.Close()
		value, err = readSysctl(f)
		return err
	})
	return value, err
}

// List returns the names of the files in a folder below /proc/sys/net. It is empty if there is no such folder.
func (n *NS) List(path string) (names []string, err error) {
	err = n.inNamespace(func() error {
		folder, err := n.openSysctl(path, os.O_RDONLY)
		if err != nil {
			return fault.Ignore(err, fs.ErrNotExist)
		}
		defer folder.Close()
		names, err = folder.Readdirnames(-1)
		return err
	})
	return names, err
}

// openSysctl opens a setting relative to the folder of its family (ipv4 or ipv6), which it keeps open. With the full path, the kernel would
// walk the folders of that name in all network namespaces, which is slow on a node with many pods.
func (n *NS) openSysctl(path string, flags int) (*os.File, error) {
	family, rest, _ := strings.Cut(path, "/")
	folder := n.sysctls[family]
	if folder == nil {
		var err error
		folder, err = store.OpenRead(filepath.Join(mountedSysctls, family), unix.O_DIRECTORY)
		if err != nil {
			folder, err = store.OpenRead(filepath.Join(sysctlRoot, family), unix.O_DIRECTORY)
		}
		if err != nil {
			return nil, err
		}
		if n.sysctls == nil {
			n.sysctls = map[string]*os.File{}
		}
		n.sysctls[family] = folder
	}
	fd, err := unix.Openat(int(folder.Fd()), rest, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(sysctlRoot, path), Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

func readSysctl(f *os.File) (string, error) {
	var buf [64]byte
	n, err := f.Read(buf[:])
	return string(bytes.TrimSpace(buf[:n])), err
}

func (n *NS) set(s Sysctl) error {
	f, err := n.openSysctl(s.Path, os.O_RDWR)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	refused := err
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
		f, err = n.openSysctl(s.Path, os.O_RDONLY)
	}
	if err != nil {
		return fmt.Errorf("sysctl %s: %w", s.Path, err)
	}
	defer f.Close()
	if got, err := readSysctl(f); err == nil && got == s.Value {
		return nil
	}
	return fault.Change(fmt.Sprintf("sysctl %s=%s", s.Path, s.Value), func() error {
		if refused != nil {
			return refused
		}
		_, err := f.WriteAt([]byte(s.Value), 0)
		return err
	})
}

// Attributes of netconf messages in rtnetlink(7) (include/uapi/linux/netconf.h), which package netlink lacks.
const (
	netconfIfindex    = 1
	netconfForwarding = 2
	allLinks          = -1
)

// IsNoFamily reports whether an error means that the kernel lacks the address family, such as IPv6.
func IsNoFamily(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT)
}

// Forwards reports whether forwarding is enabled for all links (net.ipv4.ip_forward or net.ipv6.conf.all.forwarding). IsNoFamily is true
// for the error if the kernel lacks the address family.
func (n *NS) Forwards(is4 bool) (bool, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETNETCONF, unix.NLM_F_ACK)
	req.Sockets = n.sockets
	// struct netconfmsg: the address family, padded to four bytes
	all := int32(allLinks)
	req.AddRawData(append([]byte{familyOf(is4), 0, 0, 0}, nl.NewRtAttr(netconfIfindex, nl.Uint32Attr(uint32(all))).Serialize()...))
	replies, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return false, fmt.Errorf("netconf show all: %w", err)
	}
	if len(replies) != 1 || len(replies[0]) < 4 {
		return false, fmt.Errorf("netconf show all: %d answers", len(replies))
	}
	value := attributeAt(replies[0][4:], netconfForwarding)
	return len(value) == 4 && binary.NativeEndian.Uint32(value) != 0, nil
}

// EnableForwarding enables forwarding for all links, and reports whether it was off. It is a no-op if the kernel lacks the address family.
func (n *NS) EnableForwarding(is4 bool) (changed bool, err error) {
	on, err := n.Forwards(is4)
	switch {
	case IsNoFamily(err):
		return false, nil
	case err != nil || on:
		return false, err
	case is4:
		return true, n.Set(Sysctl{Path: "ipv4/ip_forward", Value: "1"})
	}
	if err := n.KeepRouterAdvertisements(); err != nil {
		return false, err
	}
	return true, n.Set(Sysctl{Path: "ipv6/conf/all/forwarding", Value: "1"})
}
