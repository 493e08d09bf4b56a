// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Restore creates the missing leases of all live attachments, for example after somebody has emptied a lease folder.
func Restore(log *slog.Logger) error {
	networks, err := attachment.Networks()
	errs := []error{err}
	for _, network := range networks {
		errs = append(errs, restore(network, log, attachment.Waiting, nil))
	}
	return errors.Join(errs...)
}

// restore creates the missing leases of a network's attachments, of the valid ones if GC gives them. It reads the record of the oldest
// attachment only, unless one of its leases is missing.
func restore(network string, log *slog.Logger, locks attachment.Locker, valid map[plugin.Attachment]bool) error {
	var errs []error
	for _, kind := range []string{"bridge", "host-local"} {
		for rec := range attachment.OldestIn(network, kind) {
			if addresses := rec.Addresses(); len(addresses) > 0 && len(missing(rec)) == 0 {
				break
			}
			if valid != nil && !valid[rec.Attachment()] {
				continue
			}
			errs = append(errs, restoreLeases(rec, log, locks))
		}
	}
	return locks.Tolerate(errors.Join(errs...))
}

// missing returns the addresses in a record that have no lease file, if host-local assigned them.
func missing(rec attachment.Record) (lost []netip.Addr) {
	dir, ok := leaseDirOf(rec)
	for _, p := range rec.Addresses() {
		if _, err := os.Lstat(filepath.Join(dir, p.Addr().String())); ok && errors.Is(err, fs.ErrNotExist) {
			lost = append(lost, p.Addr())
		}
	}
	return lost
}

func restoreLeases(listed attachment.Record, log *slog.Logger, locks attachment.Locker) error {
	att, rec, ok, err := attachment.Reopen[state](locks, listed.Key, listed.Plugin)
	if err != nil || !ok {
		return err
	}
	defer att.Close()
	lost := missing(rec.Record)
	if len(lost) == 0 || rec.State.Unfinished || plugin.NetnsGone(rec.Netns) {
		return nil
	}
	path, _ := leaseDirOf(rec.Record)
	dir, err := store.Make(path, 0o755)
	if err != nil {
		return err
	}
	l, err := lockLeases(dir, rec.Network, log, locks)
	if err != nil {
		return err
	}
	defer l.close()
	var errs []error
	for _, addr := range lost {
		_, err := l.createLease(addr, rec.Attachment())
		errs = append(errs, err)
	}
	log.Warn("restored lost leases", "network", rec.Network, "of", rec.ContainerID, "ifname", rec.IfName, "addresses", lost)
	return errors.Join(errs...)
}

// leaseDirOf returns the lease folder that an attachment's addresses are from. The result ok is false if another IPAM plugin assigned them.
func leaseDirOf(rec attachment.Record) (path string, ok bool) {
	object := ipam.Object(rec.State)
	return leaseDir(rec.Network, dataDirOf(object)), plugin.Kind(ipam.Type(object)) == "host-local"
}
