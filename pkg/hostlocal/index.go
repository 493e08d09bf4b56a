// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// The index tells the leases of an attachment without reading all of them, and since when each exists. It lives in
// <dataDir>/.podlace/<network>, which programs of others that work on the lease folder never see: shards, chosen by a hash of the
// attachment, and a mark with the modification time that the lease folder had when the index was last right. Whenever the folder has
// another time, somebody else, or a process that was killed, changed it: then the index is made anew.
const (
	indexFolder = ".podlace"
	markFile    = "mark"
	restFile    = "released"
	indexFormat = 1
	torn        = "torn"

	// shards is how many files the index has: with 10,000 leases each holds some ten.
	shards = 1024
)

// entry is what the index knows of an attachment.
type entry struct {
	plugin.Attachment
	Addresses []netip.Addr `json:"addresses"`
	Boot      string       `json:"boot"`            // when the lease was made, or first seen
	Netns     string       `json:"netns,omitempty"` // CNI_NETNS of the ADD
}

// shard is a part of the index, by container ID and interface name.
type shard map[string]entry

type mark struct {
	Format   int   `json:"format"`
	Modified int64 `json:"modified"` // nanoseconds since 1970, of the lease folder
}

func entryKey(a plugin.Attachment) string { return a.ContainerID + "/" + a.IfName }

func shardName(a plugin.Attachment) string {
	sum := sha512.Sum512([]byte(entryKey(a)))
	return fmt.Sprintf("%03x", (int(sum[0])<<8|int(sum[1]))%shards)
}

// index is the open index of a lease folder whose lock is held.
type index struct {
	dir    *store.Dir
	leases *store.Dir
	boot   string
}

func indexPath(leases string) string {
	return filepath.Join(filepath.Dir(leases), indexFolder, filepath.Base(leases))
}

func openIndex(l *leases) (*index, error) {
	dir, err := store.Make(indexPath(l.dir.Path()), 0o700)
	if err != nil {
		return nil, fmt.Errorf("lease index: %w", err)
	}
	boot, err := bootID()
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &index{dir, l.dir, boot}, nil
}

// bootID tells one boot of the node from another.
func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
}

func (x *index) close() { x.dir.Close() }

// trusted tells whether nobody else changed the lease folder since settle.
func (x *index) trusted() bool {
	var m mark
	data, err := x.dir.Read(markFile)
	if err != nil || json.Unmarshal(data, &m) != nil || m.Format != indexFormat {
		return false
	}
	modified, err := x.leases.Modified()
	return err == nil && modified == m.Modified
}

// settle says that the index is right for the lease folder as it is now.
func (x *index) settle() error {
	modified, err := x.leases.Modified()
	if err != nil {
		return err
	}
	return x.write(markFile, mark{indexFormat, modified})
}

func (x *index) write(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := x.dir.Write(name, data, 0o600); err != nil {
		return fmt.Errorf("lease index: %w", err)
	}
	return nil
}

// read returns a shard; one that is missing or damaged is empty, and then the mark was not settled either.
func (x *index) read(name string) (shard, error) {
	s := shard{}
	data, err := x.dir.Read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("lease index: %w", err)
	}
	if json.Unmarshal(data, &s) != nil {
		return shard{}, nil
	}
	return s, nil
}

// get returns the entry of an attachment.
func (x *index) get(a plugin.Attachment) (entry, bool, error) {
	s, err := x.read(shardName(a))
	e, ok := s[entryKey(a)]
	return e, ok, err
}

// put writes the entry of an attachment; an entry without addresses is removed.
func (x *index) put(e entry) error {
	name := shardName(e.Attachment)
	s, err := x.read(name)
	if err != nil {
		return err
	}
	if len(e.Addresses) == 0 {
		delete(s, entryKey(e.Attachment))
	} else {
		slices.SortFunc(e.Addresses, netip.Addr.Compare)
		s[entryKey(e.Attachment)] = e
	}
	return x.replace(name, s)
}

// shardFiles returns the names of the shards that exist.
func (x *index) shardFiles() ([]string, error) {
	names, err := x.dir.List()
	if err != nil {
		return nil, fmt.Errorf("lease index: %w", err)
	}
	return slices.DeleteFunc(names, func(name string) bool { return len(name) != 3 }), nil
}

// all returns every entry.
func (x *index) all() ([]entry, error) {
	names, err := x.shardFiles()
	if err != nil {
		return nil, err
	}
	var out []entry
	for _, name := range names {
		s, err := x.read(name)
		if err != nil {
			return nil, err
		}
		for _, e := range s {
			out = append(out, e)
		}
	}
	return out, nil
}

// rebuild reads every lease. An attachment that the index knew keeps the boot that it was known from; one that is new to it counts as
// made in the present boot, since nothing tells that its pod is gone.
func (x *index) rebuild(found map[netip.Addr]plugin.Attachment) error {
	known, err := x.all()
	if err != nil {
		return err
	}
	old := map[plugin.Attachment]entry{}
	for _, e := range known {
		old[e.Attachment] = e
	}
	byName := map[string]shard{}
	for addr, of := range found {
		name := shardName(of)
		if byName[name] == nil {
			byName[name] = shard{}
		}
		e, ok := byName[name][entryKey(of)]
		if !ok {
			e = entry{Attachment: of, Boot: x.boot}
			if o, ok := old[of]; ok {
				e.Boot, e.Netns = o.Boot, o.Netns
			}
		}
		e.Addresses = append(e.Addresses, addr)
		slices.SortFunc(e.Addresses, netip.Addr.Compare)
		byName[name][entryKey(of)] = e
	}
	names, err := x.shardFiles()
	if err != nil {
		return err
	}
	for _, name := range names {
		if byName[name] == nil {
			if err := x.dir.Remove(name); err != nil {
				return err
			}
		}
	}
	for name, s := range byName {
		if err := x.write(name, s); err != nil {
			return err
		}
	}
	return x.settle()
}

func (x *index) replace(name string, s shard) error {
	if len(s) == 0 {
		return x.dir.Remove(name)
	}
	return x.write(name, s)
}

// maxResting is how many released addresses are remembered.
const maxResting = 256

// resting returns the addresses that were released last, oldest first. They are given out again only when nothing else is free, so
// that a peer that still talks to a pod that is gone does not reach another at once.
func (x *index) resting() ([]netip.Addr, error) {
	data, err := x.dir.Read(restFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var list []netip.Addr
	if err == nil && json.Unmarshal(data, &list) != nil {
		list = nil // only a preference is lost
	}
	return list, err
}

// rest remembers released addresses.
func (x *index) rest(released []netip.Addr) error {
	list, err := x.resting()
	if err != nil || len(released) == 0 {
		return err
	}
	list = append(list, released...)
	return x.write(restFile, list[max(0, len(list)-maxResting):])
}

// wake forgets that an address was released, since it is given out.
func (x *index) wake(addr netip.Addr) error {
	list, err := x.resting()
	if err != nil || !slices.Contains(list, addr) {
		return err
	}
	return x.write(restFile, slices.DeleteFunc(list, func(a netip.Addr) bool { return a == addr }))
}

// dead tells whether the pod of an entry is certainly gone: the node was booted since, or its namespace no longer exists.
func (x *index) dead(e entry) bool { return e.Boot != x.boot || plugin.NetnsGone(e.Netns) }
