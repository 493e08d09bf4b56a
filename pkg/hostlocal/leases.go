// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// The lease folder is the reference plugins': a file for each address, named by it, with "<containerID>\r\n<ifname>" in it;
// last_reserved_ip.<set> with the address that the set gave last; lock for flock(2). Programs of others read it.
const (
	lockFile   = "lock"
	lastPrefix = "last_reserved_ip."
)

// leases is the open, locked lease folder of a network with its index.
type leases struct {
	dir   *store.Dir
	lock  *store.Lock
	index *index
	log   *slog.Logger
}

// openLeases locks the folder and brings the index up to date.
func openLeases(path string, log *slog.Logger) (*leases, error) {
	dir, err := store.Make(path, 0o755)
	if err != nil {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	lock, err := dir.Lock(lockFile, 0o750)
	if err != nil {
		dir.Close()
		return nil, err
	}
	l := &leases{dir: dir, lock: lock, log: log}
	if l.index, err = openIndex(l); err == nil && !l.index.trusted() {
		err = l.reindex()
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *leases) reindex() error {
	found, err := l.all()
	if err != nil {
		return err
	}
	return l.index.rebuild(found)
}

func (l *leases) close() {
	if l.index != nil {
		l.index.close()
	}
	l.lock.Unlock()
	l.dir.Close()
}

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

// all reads every lease. An empty file is what a process left that was killed between making and writing it: it is put aside, so that its
// address is free again.
func (l *leases) all() (map[netip.Addr]plugin.Attachment, error) {
	found, empty, err := readLeases(l.dir, l.log)
	if err != nil {
		return nil, err
	}
	for _, name := range empty {
		if err := l.putAside(name); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// readLeases reads every lease; what is no lease file is left out, and the names of empty ones are told.
func readLeases(dir *store.Dir, log *slog.Logger) (found map[netip.Addr]plugin.Attachment, empty []string, err error) {
	names, err := dir.List()
	if err != nil {
		return nil, nil, fmt.Errorf("lease folder: %w", err)
	}
	found = make(map[netip.Addr]plugin.Attachment, len(names))
	for _, name := range names {
		addr, err := netip.ParseAddr(name)
		if err != nil {
			continue
		}
		data, err := dir.Read(name)
		of := parseOwner(string(data))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			log.Warn("unreadable lease keeps its address", "lease", name, "error", err)
		case of.ContainerID == "":
			empty = append(empty, name)
		default:
			found[addr] = of
		}
	}
	return found, empty, nil
}

// putAside moves a torn lease into the folder of the index, for the admin to look at.
func (l *leases) putAside(name string) error {
	to, err := store.Make(filepath.Join(l.index.dir.Path(), torn), 0o700)
	if err != nil {
		return err
	}
	defer to.Close()
	l.log.Warn("torn lease is put aside", "lease", name, "folder", to.Path())
	return l.dir.Move(name, to)
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

// release ends the lease of addr if it is still a's.
func (l *leases) release(addr netip.Addr, a plugin.Attachment) (bool, error) {
	ok, err := l.holds(addr, a)
	if !ok || err != nil {
		return false, err
	}
	if err := l.dir.Remove(addr.String()); err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return true, nil
}

// holds tells whether the lease of addr is a's.
func (l *leases) holds(addr netip.Addr, a plugin.Attachment) (bool, error) {
	data, err := l.dir.Read(addr.String())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return owns(parseOwner(string(data)), a), nil
}

// written returns when the first lease of an entry was made.
func (l *leases) written(e entry) time.Time {
	for _, addr := range e.Addresses {
		if at, err := l.dir.Written(addr.String()); err == nil {
			return at
		}
	}
	return time.Time{}
}

// entries returns what the index knows of an attachment: the entry of the old file format, without interface name, comes second.
func (l *leases) entries(a plugin.Attachment) ([]entry, error) {
	var out []entry
	for _, key := range []plugin.Attachment{a, {ContainerID: a.ContainerID}} {
		e, ok, err := l.index.get(key)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, e)
		}
	}
	return out, nil
}

// end releases all leases of an entry and forgets it.
func (l *leases) end(e entry) (released []netip.Addr, err error) {
	var errs []error
	for _, addr := range e.Addresses {
		ok, err := l.release(addr, e.Attachment)
		errs = append(errs, err)
		if ok {
			released = append(released, addr)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return released, err
	}
	e.Addresses = nil
	if err := l.index.put(e); err != nil {
		return released, err
	}
	return released, l.index.rest(released)
}

// names returns the addresses that have a lease file, whatever is in it.
func (l *leases) names() (map[netip.Addr]bool, error) {
	names, err := l.dir.List()
	if err != nil {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	taken := make(map[netip.Addr]bool, len(names))
	for _, name := range names {
		if addr, err := netip.ParseAddr(name); err == nil {
			taken[addr] = true
		}
	}
	return taken, nil
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
