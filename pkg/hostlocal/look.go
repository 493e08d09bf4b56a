// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Lease describes the addresses that are leased to one attachment.
type Lease struct {
	Addresses []netip.Addr
	Earlier   bool      // all leases were made before the current boot
	Written   time.Time // time of the newest file
}

// Leases reads a lease folder without a lock or any change. The owner of a lease in the old format has no interface name.
func Leases(path string) (map[plugin.Attachment]Lease, error) {
	l, all, err := readLeases(path)
	found := map[plugin.Attachment]Lease{}
	for _, is := range all {
		if is.torn() {
			continue
		}
		of, old := found[is.of]
		of.Addresses = append(of.Addresses, is.addr)
		of.Earlier = (of.Earlier || !old) && is.written.Before(l.since)
		if is.written.After(of.Written) {
			of.Written = is.written
		}
		found[is.of] = of
	}
	return found, ignoreMissing(err)
}

// readLeases reads all leases of a folder, which it closes again, and when this boot began to use it. It logs nothing, because STATUS calls
// it every few seconds.
func readLeases(path string) (l *leases, all []lease, err error) {
	dir, err := store.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer dir.Close()
	l = &leases{dir: dir, network: filepath.Base(path), log: slog.New(slog.DiscardHandler)}
	l.since, _, err = boot(dir)
	all, unread := l.all()
	return l, all, errors.Join(err, unread)
}
