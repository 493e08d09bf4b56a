// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Lease describes the addresses that are leased to one attachment.
type Lease struct {
	plugin.Attachment // without an interface name if the lease has the old format
	Addresses         []netip.Addr
	Earlier           bool      // all leases were made before the current boot
	Written           time.Time // time of the newest file
}

// Leases reads a lease folder. Leases takes no lock and changes nothing.
func Leases(path string) ([]Lease, error) {
	l, all, err := readLeases(path, slog.New(slog.DiscardHandler))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []Lease
	at := map[plugin.Attachment]int{}
	for _, is := range all {
		if is.torn() {
			continue
		}
		i, ok := at[is.of]
		if !ok {
			i = len(out)
			at[is.of] = i
			out = append(out, Lease{Attachment: is.of, Earlier: true})
		}
		out[i].Addresses = append(out[i].Addresses, is.addr)
		out[i].Earlier = out[i].Earlier && is.written.Before(l.since)
		if is.written.After(out[i].Written) {
			out[i].Written = is.written
		}
	}
	return out, err
}

// readLeases reads all leases of a folder, which it closes again, and when this boot began to use the folder.
func readLeases(path string, log *slog.Logger) (l *leases, all []lease, err error) {
	dir, err := store.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer dir.Close()
	l = &leases{dir: dir, network: filepath.Base(path), log: log}
	l.since, _, err = boot(dir)
	all, unread := l.all()
	return l, all, errors.Join(err, unread)
}
