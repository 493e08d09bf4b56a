// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"crypto/sha512"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// The lease folder has the format of the reference plugin, because other programs read this folder. Each assigned address has a lease file
// with the address as its name and "<containerID>\r\n<ifname>" as its content. The file last_reserved_ip.<set> contains the last address
// that was assigned from the set. Each process that changes the folder locks the file "lock" with flock(2).
const (
	lockFile   = "lock"
	lastPrefix = "last_reserved_ip."
)

// The type leases is the lease folder of a network. The folder is open and locked, and its index is open too.
type leases struct {
	dir   *store.Dir
	lock  *store.Lock
	index *index
	log   *slog.Logger
}

// openLeases locks the lease folder. If another program has changed the folder, openLeases rebuilds the index.
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
	if l.index, err = openIndex(l); err == nil && !l.index.isTrusted() {
		err = l.reindex()
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *leases) reindex() error {
	found, err := l.readAll()
	if err == nil {
		l.index.rebuild(found)
	}
	return err
}

// withRebuild runs the function f, which uses the index. If f detects a damaged index, withRebuild rebuilds the index and runs f again. If
// f fails again, another process is changing the index, for example after an admin has removed the lock file. In this case, withRebuild
// runs f with an index in the memory of this process.
func (l *leases) withRebuild(f func() error) error {
	err := f()
	for _, remedy := range []func() error{l.reindex, l.detachIndex} {
		if !errors.Is(err, errDamaged) {
			return err
		}
		l.log.Warn("the lease index is rebuilt", "error", err)
		if err = remedy(); err == nil {
			err = f()
		}
	}
	return err
}

func (l *leases) detachIndex() error {
	found, err := l.readAll()
	if err != nil {
		return err
	}
	known, err := l.index.allEntries(true)
	if err == nil {
		l.index.memory = l.index.distribute(found, known)
	}
	return err
}

func (l *leases) close() {
	if l.index != nil {
		l.index.close()
	}
	l.lock.Unlock()
	l.dir.Close()
}

// leaseContent returns the content of a lease file for an owner.
func leaseContent(a plugin.Attachment) string { return a.ContainerID + "\r\n" + a.IfName }

// maxLease is the maximum size of a lease file in bytes. A container ID has 64 characters, and an interface name has at most 15.
const maxLease = 1024

// parseOwner parses the content of a lease file. Before version 0.7, the reference plugin wrote only the container ID to the file. For
// invalid content, parseOwner returns an ID that no container has, so that the address counts as taken.
func parseOwner(data []byte) plugin.Attachment {
	id, ifname, _ := strings.Cut(strings.TrimSpace(string(data)), "\r\n")
	foreign := func(c rune) bool { return c <= ' ' || c >= 0x7f || c == '/' }
	// This check allows more interface names than plugin.ValidIfName, because leases of other plugins may contain names such as "default" or
	// "a%b".
	foreignIf := func(c rune) bool { return c == ' ' || c == '/' || !unicode.IsPrint(c) }
	if len(data) > maxLease || strings.ContainsFunc(id, foreign) || strings.ContainsFunc(ifname, foreignIf) || !utf8.ValidString(ifname) {
		return plugin.Attachment{ContainerID: fmt.Sprintf("?%x", sha512.Sum512_256(data))}
	}
	return plugin.Attachment{ContainerID: id, IfName: ifname}
}

func owns(lease, a plugin.Attachment) bool {
	return lease.ContainerID == a.ContainerID && (lease.IfName == a.IfName || lease.IfName == "")
}

// readAll reads all leases of the folder. If a process is killed after it creates a lease file and before it writes the content, the file
// is empty. readAll moves empty files to another folder, so that their addresses can be assigned.
func (l *leases) readAll() (map[netip.Addr]lease, error) {
	found, empty, err := readLeases(l.dir, l.log)
	if err != nil {
		return nil, err
	}
	for _, name := range empty {
		if err := l.quarantine(l.dir, name); err != nil {
			l.log.Warn("torn lease keeps its address", "lease", name, "error", err)
		}
	}
	return found, nil
}

// The type lease contains the content and the modification time of a lease file.
type lease struct {
	of      plugin.Attachment
	written int64 // modification time in nanoseconds since 1970
}

// readLeases reads all leases of a folder. readLeases ignores files that are not leases, and returns the names of empty lease files in the
// list "empty".
func readLeases(dir *store.Dir, log *slog.Logger) (found map[netip.Addr]lease, empty []string, err error) {
	names, err := dir.List()
	if err != nil {
		return nil, nil, fmt.Errorf("lease folder: %w", err)
	}
	found = make(map[netip.Addr]lease, len(names))
	for _, name := range names {
		addr, err := netip.ParseAddr(name)
		if err != nil {
			continue
		}
		data, written, err := dir.ReadWritten(name)
		of := parseOwner(data)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			log.Warn("unreadable lease keeps its address", "lease", name, "error", err)
		case of.ContainerID == "":
			empty = append(empty, name)
		default:
			if of.ContainerID[0] == '?' {
				log.Warn("foreign lease keeps its address", "lease", name)
			}
			found[addr] = lease{of, written.UnixNano()}
		}
	}
	return found, empty, nil
}

// quarantine() moves a damaged file to a folder beside the index, where an admin can examine it.
func (l *leases) quarantine(from *store.Dir, name string) error {
	to, err := store.Make(filepath.Join(indexPath(l.dir.Path()), torn), 0o700)
	if err != nil {
		return err
	}
	defer to.Close()
	l.log.Warn("a damaged file is put aside", "name", name, "from", from.Path(), "to", to.Path())
	return from.Move(name, to)
}

// createLease creates the lease file of addr. The result ok is false if addr already has a lease file.
func (l *leases) createLease(addr netip.Addr, a plugin.Attachment) (ok bool, err error) {
	err = l.dir.Create(addr.String(), []byte(leaseContent(a)), 0o600)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return true, nil
}

// release() deletes the lease of an address if the given attachment still owns the lease.
func (l *leases) release(addr netip.Addr, a plugin.Attachment) (bool, error) {
	ok, err := l.ownsLease(addr, a)
	if !ok || err != nil {
		return false, err
	}
	if err := l.dir.Remove(addr.String()); err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return true, nil
}

// ownsLease reports whether the given attachment owns the lease of an address.
func (l *leases) ownsLease(addr netip.Addr, a plugin.Attachment) (bool, error) {
	data, err := l.dir.Read(addr.String())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EISDIR) || errors.Is(err, store.ErrIrregular) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return owns(parseOwner(data), a), nil
}

// owner() returns the owner of an address. The result "indexed" is true if the owner is in the index.
func (l *leases) owner(addr netip.Addr) (e entry, indexed bool, err error) {
	data, err := l.dir.Read(addr.String())
	if err != nil {
		return entry{}, false, nil
	}
	e.Attachment = parseOwner(data)
	err = l.withRebuild(func() error {
		var got entry
		if got, indexed, err = l.index.get(e.Attachment); indexed {
			e = got
		}
		return err
	})
	return e, indexed, err
}

// written() returns the modification time of the first lease in an entry.
func (l *leases) written(e entry) time.Time {
	for _, addr := range e.Addresses {
		if at, err := l.dir.Written(addr.String()); err == nil {
			return at
		}
	}
	return time.Time{}
}

// entries() returns the index entries of an attachment. An attachment may have a second entry for leases in the old format without an
// interface name.
func (l *leases) entries(a plugin.Attachment) (out []entry, err error) {
	err = l.withRebuild(func() error {
		out = nil
		for _, key := range []plugin.Attachment{a, {ContainerID: a.ContainerID}} {
			e, ok, err := l.index.get(key)
			if err != nil {
				return err
			}
			if ok {
				out = append(out, e)
			}
		}
		return nil
	})
	return out, err
}

// allEntries returns all entries of the index, and rebuilds the index if it is damaged.
func (l *leases) allEntries() (out []entry, err error) {
	err = l.withRebuild(func() error {
		out, err = l.index.allEntries(false)
		return err
	})
	return out, err
}

// endEntry first deletes all leases of an entry, and then the entry in the index. A failed write of the index is not an error, because the
// leases are already deleted.
func (l *leases) endEntry(e entry) error {
	var errs []error
	var released []netip.Addr
	for _, addr := range e.Addresses {
		ok, err := l.release(addr, e.Attachment)
		errs = append(errs, err)
		if ok {
			released = append(released, addr)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	e.Addresses = nil
	l.index.addResting(released)
	if err := l.withRebuild(func() error { return l.index.put(e) }); err != nil && l.index.broken == nil {
		l.index.useMemory(map[string]shard{}, err)
	}
	return nil
}

// markIndexCurrent calls markCurrent, but only logs its error. markIndexCurrent is for CNI commands that succeed even without a correct
// index. Without markCurrent, the next CNI command would rebuild the index, because deleting leases changes the modification time of the
// folder.
func (l *leases) markIndexCurrent() {
	if err := l.index.markCurrent(); err != nil {
		l.log.Warn("the next verb rebuilds the lease index", "error", err)
	}
}

// leasedNames returns all addresses that have a lease file. leasedNames reads the names of the lease files, but not their content.
func (l *leases) leasedNames() (map[netip.Addr]bool, error) {
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

// setLast stores the last assigned address. The next ADD begins its search after the last assigned address. setLast returns no error:
// without the stored address, the next ADD begins its search at the first address of the set.
func (l *leases) setLast(set int, addr netip.Addr) {
	name := fmt.Sprint(lastPrefix, set)
	err := l.dir.Overwrite(name, []byte(addr.String()), 0o600)
	if errors.Is(err, unix.EISDIR) {
		if err = l.quarantine(l.dir, name); err == nil {
			err = l.dir.Overwrite(name, []byte(addr.String()), 0o600)
		}
	}
	if err != nil {
		l.log.Warn("the last assigned address could not be stored", "error", err)
	}
}
