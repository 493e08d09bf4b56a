// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// The index lists the leases of each attachment, and their times, so that a verb need not read all leases. It is in
// <dataDir>/.podlace/<network>, out of sight of other programs that use the lease folder. It consists of shards, selected by a hash of the
// attachment, and a mark with the lease folder's modification time when the index was last correct. If the times differ, another program or
// a killed process changed the folder, and the index is rebuilt. It is also rebuilt after a boot, since it is not synced to disk, and if a
// shard is damaged.
//
// The index can always be rebuilt from the leases. If it cannot be written, for example on a full disk, DEL and GC work without it.
const (
	indexFolder = ".podlace"
	markFile    = "mark"
	indexFormat = 3
	torn        = "torn"

	// shards is the number of index files: with 10,000 leases each holds about ten.
	shards = 1024
)

// errDamaged means that a shard was changed or damaged. The caller rebuilds the index.
var errDamaged = errors.New("lease index: damaged")

type mark struct {
	Format   int    `json:"format"`
	Modified int64  `json:"modified"` // modification time of the lease folder in nanoseconds since 1970
	Boot     string `json:"boot"`
	Shards   []byte `json:"shards"` // one bit per existing shard
}

// index is the open index of a lease folder. The caller holds the folder's lock.
type index struct {
	dir    *store.Dir // nil if there is none and none can be created
	leases *leases
	boot   string
	mark   []byte           // the file's content when this process last read it
	shards [shards / 8]byte // one bit per shard that should exist

	// If the index cannot be written (broken holds the reason), or another process changes it too, this process keeps it in memory.
	memory map[string]shard
	broken error
}

func indexPath(leases string) string {
	return filepath.Join(filepath.Dir(leases), indexFolder, filepath.Base(leases))
}

// bootID identifies the current boot of the node.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data)), err
}

func openIndex(l *leases) (*index, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	x := &index{leases: l, boot: boot}
	if x.dir, err = store.Make(indexPath(l.dir.Path()), 0o700); err != nil {
		x.useMemory(map[string]shard{}, err)
	}
	return x, nil
}

func (x *index) close() {
	if x.dir != nil {
		x.dir.Close()
	}
}

// useMemory makes this process continue without the index files.
func (x *index) useMemory(memory map[string]shard, err error) {
	x.leases.log.Warn("the lease index cannot be written and is not used", "error", err)
	x.memory, x.broken = memory, fmt.Errorf("lease index: %w", err)
}

// trusted reports whether no other program changed the lease folder since markCurrent in this boot.
func (x *index) trusted() bool {
	var m mark
	if x.broken != nil {
		return false
	}
	x.mark, _ = x.dir.Read(markFile)
	if json.Unmarshal(x.mark, &m) != nil || m.Format != indexFormat || m.Boot != x.boot || len(m.Shards) != shards/8 {
		return false
	}
	copy(x.shards[:], m.Shards)
	modified, err := x.leases.dir.Modified()
	return err == nil && modified == m.Modified
}

// markCurrent marks the index as correct for the current state of the lease folder. If the lock file was removed, two processes may work
// concurrently, and neither may mark the index. The second process rebuilt the index, because the folder had changed. The first one sees
// that by the mark.
func (x *index) markCurrent() error {
	if x.broken != nil {
		return nil
	}
	if now, _ := x.dir.Read(markFile); x.memory != nil || !bytes.Equal(now, x.mark) {
		return x.write(markFile, []byte(rand.Text()))
	}
	modified, err := x.leases.dir.Stamp()
	if err != nil {
		return err
	}
	if x.mark, err = json.Marshal(mark{indexFormat, modified, x.boot, x.shards[:]}); err != nil {
		return err
	}
	return x.write(markFile, x.mark)
}

func (x *index) write(name string, data []byte) error {
	err := x.dir.Write(name, data, 0o600)
	// another process removed its file, because the lock file was removed
	for again := 0; again < 10 && errors.Is(err, fs.ErrNotExist); again++ {
		err = x.dir.Write(name, data, 0o600)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return plugin.Errorf(plugin.CodeTryAgain, "lease index: %s is removed again and again: %w", name, err)
	}
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOTEMPTY) { // a folder is in its place
		if err = x.leases.quarantine(x.dir, name); err == nil {
			err = x.dir.Write(name, data, 0o600)
		}
	}
	if err != nil {
		return fmt.Errorf("lease index: %w", err)
	}
	return nil
}

// read returns a shard. A missing shard is empty.
func (x *index) read(name string) (shard, error) {
	if x.memory != nil {
		return maps.Clone(x.memory[name]), nil
	}
	data, err := x.dir.Read(name)
	if errors.Is(err, fs.ErrNotExist) && !x.has(name) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return parseShard(data)
}

// bit returns the position of a shard's bit in the mark.
func bit(name string) (at int, mask byte) {
	number, _ := strconv.ParseUint(name, 16, 16)
	return int(number/8) % (shards / 8), 1 << (number % 8)
}

// has reports whether a shard should exist. A shard that should not exist has no leases.
func (x *index) has(name string) bool {
	at, mask := bit(name)
	return x.shards[at]&mask != 0
}

func (x *index) note(name string, exists bool) {
	at, mask := bit(name)
	x.shards[at] &^= mask
	if exists {
		x.shards[at] |= mask
	}
}

// get returns the entry of an attachment.
func (x *index) get(a plugin.Attachment) (entry, bool, error) {
	s, err := x.read(shardName(a))
	e, ok := s[entryKey(a)]
	return e, ok, err
}

// put writes the entry of an attachment. It removes an entry without addresses.
func (x *index) put(e entry) error {
	name := shardName(e.Attachment)
	s, err := x.read(name)
	if err != nil {
		return err
	}
	if s == nil {
		s = shard{}
	}
	if len(e.Addresses) == 0 {
		delete(s, entryKey(e.Attachment))
	} else {
		slices.SortFunc(e.Addresses, netip.Addr.Compare)
		s[entryKey(e.Attachment)] = e
	}
	if err := x.replace(name, s); err != nil {
		return err
	}
	x.note(name, len(s) > 0)
	return nil
}

func (x *index) replace(name string, s shard) error {
	if x.memory != nil {
		x.memory[name] = s
		return x.broken
	}
	if len(s) == 0 {
		return x.dir.Remove(name)
	}
	data, err := s.encode()
	if err != nil {
		return err
	}
	return x.write(name, data)
}

// renew replaces a shard if it differs. Most shards are unchanged, and reading one is cheaper than writing it.
func (x *index) renew(name string, s shard) error {
	if data, err := s.encode(); err == nil && x.memory == nil && len(s) > 0 {
		if now, err := x.dir.Read(name); err == nil && bytes.Equal(now, data) {
			return nil
		}
	}
	return x.replace(name, s)
}

// expected returns the names of the shards that should exist.
func (x *index) expected() (names []string) {
	for i := range shards {
		if name := shardAt(i); x.has(name) {
			names = append(names, name)
		}
	}
	return names
}

// shardFiles returns the names of the existing shards.
func (x *index) shardFiles() ([]string, error) {
	if x.memory != nil {
		return slices.Collect(maps.Keys(x.memory)), nil
	}
	names, err := x.dir.List()
	if err != nil {
		return nil, fmt.Errorf("lease index: %w", err)
	}
	return slices.DeleteFunc(names, func(name string) bool { return !isShard(name) }), nil
}

// allEntries returns all entries, sorted by address. With damaged set, it leaves out damaged and lost shards.
func (x *index) allEntries(damaged bool) ([]entry, error) {
	names := x.expected()
	var err error
	if damaged || x.memory != nil {
		names, err = x.shardFiles()
	}
	if err != nil {
		return nil, err
	}
	var out []entry
	for _, name := range names {
		s, err := x.read(name)
		if err != nil && !damaged {
			return nil, err
		}
		out = slices.AppendSeq(out, maps.Values(s))
	}
	slices.SortFunc(out, func(a, b entry) int { return slices.CompareFunc(a.Addresses, b.Addresses, netip.Addr.Compare) })
	return out, nil
}

// rebuild creates the index from all leases. An attachment in the old index keeps its boot and its namespace. An attachment with a new
// lease counts as made in the present boot, because nothing proves that its pod is dead.
func (x *index) rebuild(found map[netip.Addr]lease) {
	known, err := x.allEntries(true)
	byName := x.sort(found, known)
	if x.broken != nil {
		x.memory = byName
		return
	}
	var names []string
	if err == nil {
		names, err = x.shardFiles()
	}
	for _, name := range names {
		if byName[name] == nil {
			byName[name] = shard{}
		}
	}
	clear(x.shards[:])
	for name, s := range byName {
		err = errors.Join(err, x.renew(name, s))
		x.note(name, len(s) > 0)
	}
	if err = errors.Join(err, x.markCurrent()); err != nil {
		x.useMemory(byName, err)
	}
}

// sort distributes the leases over shards.
func (x *index) sort(found map[netip.Addr]lease, known []entry) map[string]shard {
	old := map[plugin.Attachment]entry{}
	for _, e := range known {
		old[e.Attachment] = e
	}
	byName := map[string]shard{}
	for addr, is := range found {
		name, key := shardName(is.of), entryKey(is.of)
		if byName[name] == nil {
			byName[name] = shard{}
		}
		o := old[is.of]
		e, ok := byName[name][key]
		if !ok {
			e = entry{Attachment: is.of, Boot: o.Boot, Netns: o.Netns, Pod: o.Pod}
		}
		if !o.matches(addr, is) {
			e.Boot, e.Netns = x.boot, ""
		}
		e.addLease(addr, is.written)
		slices.SortFunc(e.Addresses, netip.Addr.Compare)
		byName[name][key] = e
	}
	return byName
}

// isDead reports whether the pod of an entry is certainly dead: the node has booted since, or its namespace no longer exists.
func (x *index) isDead(e entry) bool { return e.Boot != x.boot || plugin.NetnsGone(e.Netns) }
