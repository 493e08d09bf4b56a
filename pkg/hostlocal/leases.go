// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"crypto/sha512"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// The lease folder has the format of the reference plugin, because other programs read it. A lease file has the address as its name and
// "<containerID>\r\n<ifname>" as its content. last_reserved_ip.<set> contains the last address assigned from the set. Processes that change
// the folder lock the file "lock" with flock(2).
const (
	lockFile   = "lock"
	lastPrefix = "last_reserved_ip."
)

// leases is the lease folder of a network, open and, except for readers, locked.
type leases struct {
	dir      *store.Dir
	lock     *store.Lock
	network  string
	log      *slog.Logger
	since    time.Time                        // leases made before are of an earlier boot; zero if none is known to be
	reserved map[netip.Addr]plugin.Attachment // lost leases of live pods that could not be restored
	unread   []error                          // records of the network that cannot be read
	vfs      []attachment.Record              // the network's records of sriov, if listed
	listed   bool
	unsure   bool // some of them cannot be read, so a lease without a record may be of a VF
}

// makeFolder opens a lease folder, and makes it if it is missing.
func makeFolder(path string) (*store.Dir, error) { return store.Make(path, 0o755) }

// openLeases opens a lease folder, with makeFolder or store.Open, and locks it. If the network never had a lease, store.Open returns
// fs.ErrNotExist.
func openLeases(open func(string) (*store.Dir, error), path, network string, log *slog.Logger, locks attachment.Locker) (*leases, error) {
	dir, err := open(path)
	if err != nil {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	lock, err := locks.File(dir, lockFile, 0o750)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &leases{dir: dir, lock: lock, network: network, log: log}, nil
}

func (l *leases) close() {
	l.lock.Unlock()
	l.dir.Close()
}

// leaseContent returns the content of a lease file for an owner.
func leaseContent(a plugin.Attachment) string { return a.ContainerID + "\r\n" + a.IfName }

// maxLease is the maximum size of a lease file in bytes. A container ID has 64 characters, and an interface name at most 15.
const maxLease = 1024

// parseOwner parses the content of a lease file, which before version 0.7 of the reference plugin was only the container ID. For invalid
// content, it returns an ID that no container has, so that the address counts as taken.
func parseOwner(data []byte) plugin.Attachment {
	id, ifname, _ := strings.Cut(strings.TrimSpace(string(data)), "\r\n")
	// leases of other plugins may contain interface names such as "default" or "a%b"
	foreign := func(c rune) bool { return c == ' ' || c == '/' || !unicode.IsPrint(c) }
	if len(data) > maxLease || !utf8.Valid(data) || strings.ContainsFunc(id+ifname, foreign) {
		return plugin.Attachment{ContainerID: fmt.Sprintf("?%x", sha512.Sum512_256(data))}
	}
	return plugin.Attachment{ContainerID: id, IfName: ifname}
}

func owns(lease, a plugin.Attachment) bool {
	return lease.ContainerID == a.ContainerID && (lease.IfName == a.IfName || lease.IfName == "")
}

type lease struct {
	addr    netip.Addr
	of      plugin.Attachment
	written time.Time
	unread  error // why the owner is not known; nil if a folder or an irregular file is in place of the lease
}

// torn reports whether the file is empty, because the reference plugin was killed after it created a lease and before it wrote the owner.
// The holder of the lock may take the address.
func (is lease) torn() bool { return is.of.ContainerID == "" }

// unreadable is the owner of a lease that cannot be read.
const unreadable = "?"

// read reads the lease of an address. ok is false if there is none; a file that cannot be read keeps its address.
func (l *leases) read(addr netip.Addr) (is lease, ok bool) {
	data, written, err := l.dir.ReadWritten(addr.String())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		of, ok := l.reserved[addr]
		return lease{addr: addr, of: of}, ok
	case err != nil:
		l.log.Warn("a lease cannot be read, so its address stays taken; remove the file if no pod has the address", "lease", addr, "error", err)
		if errors.Is(err, unix.EISDIR) || errors.Is(err, store.ErrIrregular) {
			err = nil
		}
		return lease{addr: addr, of: plugin.Attachment{ContainerID: unreadable}, unread: err}, true
	}
	return lease{addr: addr, of: parseOwner(data), written: written}, true
}

// names returns the addresses that have a lease file, in their order.
func (l *leases) names() ([]netip.Addr, error) {
	names, err := l.dir.List()
	if err != nil {
		return nil, fmt.Errorf("lease folder: %w", err)
	}
	var list []netip.Addr
	for _, name := range names {
		if addr, err := netip.ParseAddr(name); err == nil && addr.Zone() == "" && addr.String() == name {
			list = append(list, addr)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return list, nil
}

// all reads all leases of the folder.
func (l *leases) all() (list []lease, err error) {
	addresses, err := l.names()
	for _, addr := range addresses {
		if is, ok := l.read(addr); ok {
			list = append(list, is)
		}
	}
	return list, err
}

// createLease creates the lease file of addr. ok is false if it exists and is not torn.
func (l *leases) createLease(addr netip.Addr, a plugin.Attachment) (ok bool, err error) {
	content := []byte(leaseContent(a))
	err = l.dir.Create(addr.String(), content, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if is, found := l.read(addr); !found || !is.torn() {
			return false, nil
		}
		err = l.dir.Write(addr.String(), content, 0o600)
	}
	if err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return true, nil
}

// release deletes the lease of an address if the attachment owns it and it is not newer than notAfter, where zero means any time.
func (l *leases) release(addr netip.Addr, a plugin.Attachment, notAfter time.Time) (bool, error) {
	is, ok := l.read(addr)
	if !ok || is.of.ContainerID == unreadable || !owns(is.of, a) || !notAfter.IsZero() && is.written.After(notAfter) {
		return false, is.unread
	}
	if err := l.dir.Remove(addr.String()); err != nil {
		return false, fmt.Errorf("lease %s: %w", addr, err)
	}
	return true, nil
}

// recordsOf returns the records of an attachment, or of a VF, whose name is not in the key of its record. Records are on tmpfs, so their
// attachments were made in this boot.
func (l *leases) recordsOf(of plugin.Attachment) map[string]attachment.Record {
	network := strings.TrimSuffix(l.network, ipam.ChainedSuffix)
	records, err := attachment.RecordsOf(attachment.Key{Network: network, ContainerID: of.ContainerID, IfName: of.IfName},
		attachment.Plugins()...)
	if err != nil { // an unreadable record is a record
		return map[string]attachment.Record{"": {}}
	}
	if !l.listed {
		vfs, damaged, err := attachment.ReadRecords(network, "sriov-")
		l.vfs, l.listed, l.unsure = vfs, true, err != nil || len(damaged) > 0
	}
	for _, rec := range l.vfs {
		if _, ok := rec.Addresses()[of.IfName]; ok && rec.ContainerID == of.ContainerID {
			records["sriov"] = rec
		}
	}
	return records
}

// netnsOf returns the path of the namespace in an attachment's record, or "" without a record.
func (l *leases) netnsOf(of plugin.Attachment) string {
	for _, rec := range l.recordsOf(of) {
		return rec.Netns
	}
	return ""
}

// describe names the owner of a lease for messages.
func (l *leases) describe(of plugin.Attachment) string {
	if of.ContainerID == "" || of.ContainerID[0] == '?' {
		return "a file that cannot be read"
	}
	text := "container " + of.ContainerID
	for _, rec := range l.recordsOf(of) {
		if rec.Pod != "" {
			text = "pod " + rec.Pod + ", " + text
			break
		}
	}
	if of.IfName != "" {
		text += ", interface " + of.IfName
	}
	return text
}

func (l *leases) last(set int) netip.Addr {
	data, err := l.dir.Read(fmt.Sprint(lastPrefix, set))
	if err != nil {
		return netip.Addr{}
	}
	addr, _ := netip.ParseAddr(strings.TrimSpace(string(data)))
	return addr
}

// setLast stores the last assigned address, after which the next ADD begins its search. An error is only logged, because the search can
// also begin at the first one.
func (l *leases) setLast(set int, addr netip.Addr) {
	if err := l.dir.Overwrite(fmt.Sprint(lastPrefix, set), []byte(addr.String()), 0o600); err != nil {
		l.log.Warn("could not save the last assigned address: the next ADD begins its search at the first one", "address", addr, "error", err)
	}
}
