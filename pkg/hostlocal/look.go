// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Lease describes the addresses that are leased to one attachment.
type Lease struct {
	plugin.Attachment // without an interface name if the lease has the old format
	Addresses         []netip.Addr
	Netns             string    // "" if another program made the lease
	Earlier           bool      // the lease was made before the current boot
	Written           time.Time // time of the newest file
}

// Leases reads a lease folder. Leases takes no lock and changes nothing. If a lease is not in the index, Leases reports that the lease is
// from the current boot.
func Leases(path string) ([]Lease, error) {
	dir, err := store.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	found, _, err := readLeases(dir, slog.New(slog.DiscardHandler))
	if err != nil || len(found) == 0 {
		return nil, err
	}
	known, boot, err := readIndex(path)
	if err != nil {
		return nil, err
	}
	byOwner := map[plugin.Attachment]*Lease{}
	for addr, is := range found {
		l, e := byOwner[is.of], known[is.of]
		if l == nil {
			l = &Lease{Attachment: is.of, Netns: e.Netns, Earlier: e.Boot != "" && e.Boot != boot}
			byOwner[is.of] = l
		}
		if !e.matches(addr, is) {
			l.Netns, l.Earlier = "", false
		}
		l.Addresses = append(l.Addresses, addr)
		if at := time.Unix(0, is.written); at.After(l.Written) {
			l.Written = at
		}
	}
	var out []Lease
	for _, l := range byOwner {
		slices.SortFunc(l.Addresses, netip.Addr.Compare)
		out = append(out, *l)
	}
	return out, nil
}

// readIndex reads the index of a lease folder, and the ID of the current boot.
func readIndex(path string) (known map[plugin.Attachment]entry, boot string, err error) {
	if boot, err = bootID(); err != nil {
		return nil, "", err
	}
	dir, err := store.Open(indexPath(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, boot, nil
	}
	if err != nil {
		return nil, "", err
	}
	x := &index{dir: dir, boot: boot}
	defer x.close()
	entries, err := x.allEntries(true)
	known = map[plugin.Attachment]entry{}
	for _, e := range entries {
		known[e.Attachment] = e
	}
	return known, boot, err
}
