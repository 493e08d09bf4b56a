// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
)

// Restore creates the missing leases of all live attachments, for example of an emptied lease folder.
func Restore(log *slog.Logger) error {
	return restoreAll(log, attachment.Waiting, func(attachment.Record) bool { return true })
}

// restoreAll creates the missing leases of the wanted attachments.
func restoreAll(log *slog.Logger, locks attachment.Locker, wanted func(attachment.Record) bool) error {
	lost, _, err := Unleased("")
	errs := []error{err}
	for _, rec := range lost {
		if wanted(rec) {
			errs = append(errs, locks.Tolerate(restoreRecord(rec, log, locks, nil)))
		}
	}
	return errors.Join(errs...)
}

// restoreLost restores for STATUS, which waits for no lock: everything if the folder has no boot file, otherwise only if the folder has
// fewer leases of a family than the network has records, so that STATUS usually opens no record. Leases of dead pods can hide a missing one
// from it. Before the first ADD of a network in this boot, there is nothing to restore.
func restoreLost(cfg Config, leased []netip.Addr, r *plugin.Request) error {
	networks, err := attachment.Networks()
	if err != nil || !slices.Contains(networks, r.Network) {
		return err
	}
	if _, err := os.Lstat(filepath.Join(cfg.Dir, bootFile)); err == nil {
		pods, leases := countRecords(r.Network), map[bool]int{} // by whether they are of IPv4
		for _, addr := range leased {
			leases[addr.Is4()]++
		}
		if !slices.ContainsFunc(cfg.Sets, func(set RangeSet) bool { return leases[set.is4()] < pods }) {
			return nil
		}
		return restoreAll(r.Log, attachment.Trying, func(rec attachment.Record) bool { return rec.Network == r.Network })
	}
	l, err := openLeases(makeFolder, cfg.Dir, r.Network, r.Log, attachment.Trying)
	if err != nil {
		return attachment.Trying.Tolerate(err)
	}
	defer l.close()
	err = l.markBoot()
	return errors.Join(append(l.unread, err)...)
}

// countRecords returns the number of a network's attachments whose addresses are leased. With a bridge, sriov records only further VFs.
func countRecords(network string) int {
	if n := attachment.Count(network, "bridge") + attachment.Count(network, "host-local"); n > 0 {
		return n
	}
	return attachment.Count(network, "sriov")
}

// restore creates the missing leases of this folder. Addresses of attachments that another process has locked become reserved instead,
// because waiting for them under the lock of the folder would be a deadlock.
func (l *leases) restore() error {
	lost, damaged, err := Unleased(l.dir.Path())
	errs := []error{err}
	for _, d := range damaged {
		if d.Network == strings.TrimSuffix(l.network, ipam.ChainedSuffix) {
			l.unread = append(l.unread, fmt.Errorf("%s cannot be read, so leases of its pod are not restored: %w", d.Path(), d.Reason))
		}
	}
	l.reserved = map[netip.Addr]plugin.Attachment{}
	for _, rec := range lost {
		if err := restoreRecord(rec, l.log, attachment.Trying, l); err != nil {
			_, left := missing(rec)
			for _, is := range left {
				l.reserved[is.addr] = is.of
			}
			errs = append(errs, attachment.Trying.Tolerate(err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return plugin.Errorf(plugin.CodeTryAgain, "leases of live pods may be missing, and cannot be restored: %w", err)
	}
	return nil
}

// Unleased returns the records of live attachments that lack a lease, optionally of one lease folder only, and the records that cannot be
// read.
func Unleased(path string) ([]attachment.Record, []attachment.Damaged, error) {
	all, damaged, err := attachment.Scan()
	return slices.DeleteFunc(all, func(rec attachment.Record) bool {
		in, lost := missing(rec)
		return len(lost) == 0 || path != "" && path != in
	}), damaged, err
}

// missing returns the leases that a live attachment's record lists and that have no file, and the path of their folder, if host-local
// assigned them. They get the time of the record, since DEL of a dead pod releases none that is newer.
func missing(rec attachment.Record) (path string, lost []lease) {
	st, _ := attachment.StateOf[state](rec)
	if plugin.Kind(ipam.Type(st.IPAM)) != "host-local" || plugin.NetnsEnded(rec.Netns) {
		return "", nil
	}
	network := rec.Network
	if st.Chained {
		network += ipam.ChainedSuffix
	}
	path = LeaseDir(network, dataDirOf(st.IPAM))
	for ifname, addresses := range rec.Addresses() {
		for _, p := range addresses {
			if _, err := os.Lstat(filepath.Join(path, p.Addr().String())); errors.Is(err, fs.ErrNotExist) {
				lost = append(lost, lease{addr: p.Addr(), of: plugin.Attachment{ContainerID: rec.ContainerID, IfName: ifname},
					written: rec.Written})
			}
		}
	}
	return path, lost
}

// restoreRecord creates the missing leases of a record, in l if the caller has locked the folder.
func restoreRecord(listed attachment.Record, log *slog.Logger, locks attachment.Locker, l *leases) error {
	att, rec, ok, err := attachment.Reopen[state](locks, listed.Key, listed.Plugin)
	if err != nil || !ok {
		return err
	}
	defer att.Close()
	path, lost := missing(rec.Record)
	if len(lost) == 0 {
		return nil
	}
	if l == nil {
		if l, err = openLeases(makeFolder, path, rec.Network, log, locks); err != nil {
			return err
		}
		defer l.close()
	}
	for _, is := range lost {
		ok, err := l.createLease(is.addr, is.of)
		if ok {
			err = l.dir.SetWritten(is.addr.String(), is.written)
		}
		if !ok || err != nil {
			return errors.Join(err, fmt.Errorf("lease of %s for %s: not restored", is.addr, l.describe(is.of)))
		}
		log.Warn("restored a lost lease", "network", rec.Network, "address", is.addr, "of", is.of.ContainerID, "ifname", is.of.IfName)
	}
	return nil
}
