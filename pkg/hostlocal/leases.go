// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// The lease folder is the reference plugins': a file for each address, named by it, with "<containerID>\r\n<ifname>" in it;
// last_reserved_ip.<set> with the address that the set gave last; lock for flock(2). Programs of others read it.
const (
	lockFile   = "lock"
	lastPrefix = "last_reserved_ip."
)

// leases is the open, locked lease folder of a network.
type leases struct {
	dir  *store.Dir
	lock *store.Lock
}

func openLeases(path string) (*leases, error) {
	dir, err := store.Make(path, 0o755)
	if err != nil {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	lock, err := dir.Lock(lockFile, 0o750)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &leases{dir, lock}, nil
}

func (l *leases) close() { l.lock.Unlock(); l.dir.Close() }

// owner renders what a lease file holds.
func owner(a plugin.Attachment) string { return a.ContainerID + "\r\n" + a.IfName }

// parseOwner reads a lease file. Files written before the reference's version 0.7 hold only the container ID.
func parseOwner(data string) plugin.Attachment {
	id, ifname, _ := strings.Cut(strings.TrimSpace(data), "\r\n")
	return plugin.Attachment{ContainerID: id, IfName: ifname}
}

func owns(lease, a plugin.Attachment) bool {
	return lease.ContainerID == a.ContainerID && (lease.IfName == a.IfName || lease.IfName == "")
}

// all reads every lease; what is no lease file is left out.
func (l *leases) all() (map[netip.Addr]plugin.Attachment, error) {
	names, err := l.dir.List()
	if err != nil {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	found := make(map[netip.Addr]plugin.Attachment, len(names))
	for _, name := range names {
		addr, err := netip.ParseAddr(name)
		if err != nil {
			continue
		}
		data, err := l.dir.Read(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			// A folder or a link in place of a lease keeps its address, and must not stop other pods.
			slog.Warn("lease cannot be read", "lease", name, "error", err)
		}
		found[addr] = parseOwner(string(data))
	}
	return found, nil
}

// take makes the lease of addr; ok is false when somebody has it.
func (l *leases) take(addr netip.Addr, a plugin.Attachment) (ok bool, err error) {
	err = l.dir.Create(addr.String(), []byte(owner(a)), 0o600)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return true, nil
}

func (l *leases) release(addr netip.Addr) error {
	if err := l.dir.Remove(addr.String()); err != nil {
		return fmt.Errorf("lease %s: %w", addr, err)
	}
	return nil
}

func (l *leases) last(set int) netip.Addr {
	data, err := l.dir.Read(fmt.Sprint(lastPrefix, set))
	if err != nil {
		return netip.Addr{}
	}
	addr, _ := netip.ParseAddr(strings.TrimSpace(string(data)))
	return addr
}

func (l *leases) setLast(set int, addr netip.Addr) error {
	return l.dir.Overwrite(fmt.Sprint(lastPrefix, set), []byte(addr.String()), 0o600) // only a preference is lost by a kill
}
