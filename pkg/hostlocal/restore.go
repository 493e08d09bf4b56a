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

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
)

// Restore creates the missing leases of all live attachments, except for those of VFs, for example after somebody has emptied a lease
// folder.
func Restore(log *slog.Logger) error {
	networks, err := attachment.Networks()
	errs := []error{err}
	for _, network := range networks {
		errs = append(errs, restore(network, log, attachment.Waiting, nil))
	}
	return errors.Join(errs...)
}

// restore creates the missing leases of a network's attachments, of the valid ones if GC gives them. Where it does not wait for locks, it
// ends at once if the oldest attachment has its leases, because who empties a folder takes all leases. Therefore, it creates those of the
// oldest one last, and only after all others.
func restore(network string, log *slog.Logger, locks attachment.Locker, valid map[plugin.Attachment]bool) error {
	var errs []error
	for _, kind := range []string{"bridge", "host-local"} {
		var lost []attachment.Record
		for rec := range attachment.OldestIn(network, kind) {
			if valid != nil && !valid[rec.Attachment()] {
				continue
			}
			if len(missing(rec)) > 0 {
				lost = append(lost, rec)
			} else if len(lost) == 0 && locks == attachment.Trying {
				break
			}
		}
		failed := false
		for i, rec := range slices.Backward(lost) {
			if i == 0 && failed {
				break
			}
			err := restoreLeases(rec, log, locks)
			failed = failed || err != nil
			errs = append(errs, locks.Tolerate(err))
		}
	}
	return errors.Join(errs...)
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
	l, err := openLeases(path, rec.Network, log, locks)
	if err != nil {
		return err
	}
	defer l.close()
	for _, addr := range lost {
		if ok, err := l.createLease(addr, rec.Attachment()); !ok || err != nil {
			return errors.Join(err, fmt.Errorf("lease of %s for container %s, %s: not restored", addr, rec.ContainerID, rec.IfName))
		}
	}
	log.Warn("restored lost leases", "network", rec.Network, "of", rec.ContainerID, "ifname", rec.IfName, "addresses", lost)
	return nil
}

// leaseDirOf returns the lease folder that an attachment's addresses are from. The result ok is false if another IPAM plugin assigned them.
func leaseDirOf(rec attachment.Record) (path string, ok bool) {
	object := ipam.Object(rec.State)
	return leaseDir(rec.Network, dataDirOf(object)), plugin.Kind(ipam.Type(object)) == "host-local"
}
