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

// The index contains the leases of each attachment and the modification times of these leases. With the index, a CNI command does not have
// to read all leases. The index is in <dataDir>/.podlace/<network>, so programs that read the lease folder do not find the index files. The
// index consists of many files, called shards, and one file "mark". A hash of the attachment selects its shard. The file "mark" contains
// the modification time that the lease folder had when the index was last correct. If the lease folder has another modification time,
// another program or a killed process has changed the folder. In this case, the plugin rebuilds the index. The plugin also rebuilds the
// index if a shard is damaged, and after each boot, because the index is not synced to disk.
//
// The plugin can rebuild all data of the index from the leases. If the plugin cannot write the index, for example because the disk is full,
// DEL and GC work without the index.
const (
	indexFolder = ".podlace"
	markFile    = "mark"
	indexFormat = 3
	torn        = "torn"

	// The constant shards is the number of index files. With 10,000 leases, each file contains about ten leases.
	shards = 1024
)

// errDamaged means that another program changed a shard, or that the shard is damaged. The caller must rebuild the index.
var errDamaged = errors.New("lease index: damaged")

type mark struct {
	Format   int    `json:"format"`
	Modified int64  `json:"modified"` // modification time of the lease folder in nanoseconds since 1970
	Boot     string `json:"boot"`
	Shards   []byte `json:"shards"` // one bit per existing shard
}

// The type index is the open index of a lease folder. The caller holds the lock of the lease folder.
type index struct {
	dir    *store.Dir // nil if the folder does not exist and cannot be created
	leases *leases
	boot   string
	mark   []byte           // the file's content when this process last read it
	shards [shards / 8]byte // one bit per shard that should exist

	// If this process cannot write the index files, or if another process also changes them, the field "memory" replaces the index files. If
	// this process cannot write the files, the next field contains the reason.
	memory map[string]shard
	broken error
}

func indexPath(leases string) string {
	return filepath.Join(filepath.Dir(leases), indexFolder, filepath.Base(leases))
}

// bootID returns the ID of the node's current boot.
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

// useMemory makes this process continue without the index files, and logs the reason as a warning.
func (x *index) useMemory(memory map[string]shard, err error) {
	x.leases.log.Warn("the lease index cannot be written and is not used", "error", err)
	x.memory, x.broken = memory, fmt.Errorf("lease index: %w", err)
}

// isTrusted returns true if the lease folder has not changed and the node has not booted since the last markCurrent. The index is then
// still correct.
func (x *index) isTrusted() bool {
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

// markCurrent writes the file "mark". The file "mark" says that the index is correct for the current state of the lease folder. If an admin
// removes the lock file, two processes may change the lease folder at the same time. In this case, the index must not count as correct when
// both processes have ended. The second process rebuilds the index, because the folder has changed, and writes a new file "mark". The first
// process then finds that the file "mark" has changed since it read the file, and replaces it by an invalid mark.
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
	// another process removed the temporary file; this can happen after an admin has removed the lock file
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

// readShard returns a shard of the index. If no attachment of the shard has a lease, the shard has no file, and readShard returns an empty
// shard.
func (x *index) readShard(name string) (shard, error) {
	if x.memory != nil {
		return maps.Clone(x.memory[name]), nil
	}
	data, err := x.dir.Read(name)
	if errors.Is(err, fs.ErrNotExist) && !x.hasShard(name) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return parseShard(data)
}

// bitOf returns the position of a shard's bit in the file "mark". The bit is set if the shard should exist.
func bitOf(name string) (at int, mask byte) {
	number, _ := strconv.ParseUint(name, 16, 16)
	return int(number/8) % (shards / 8), 1 << (number % 8)
}

// hasShard reports whether a shard should exist. A shard exists only while one of its attachments has a lease.
func (x *index) hasShard(name string) bool {
	at, mask := bitOf(name)
	return x.shards[at]&mask != 0
}

func (x *index) note(name string, exists bool) {
	at, mask := bitOf(name)
	x.shards[at] &^= mask
	if exists {
		x.shards[at] |= mask
	}
}

// get() returns the entry of an attachment from the index.
func (x *index) get(a plugin.Attachment) (entry, bool, error) {
	s, err := x.readShard(shardName(a))
	e, ok := s[entryKey(a)]
	return e, ok, err
}

// put() writes the entry of an attachment to the index. If the entry has no addresses, put() removes the entry from the index.
func (x *index) put(e entry) error {
	name := shardName(e.Attachment)
	s, err := x.readShard(name)
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

// renew() writes a shard only if its content has changed. renew() saves time, because most shards have not changed, and a read takes less
// time than a write.
func (x *index) renew(name string, s shard) error {
	if data, err := s.encode(); err == nil && x.memory == nil && len(s) > 0 {
		if now, err := x.dir.Read(name); err == nil && bytes.Equal(now, data) {
			return nil
		}
	}
	return x.replace(name, s)
}

// expectedShards returns the names of the shards that should have a file.
func (x *index) expectedShards() (names []string) {
	for i := range shards {
		if name := shardAt(i); x.hasShard(name) {
			names = append(names, name)
		}
	}
	return names
}

// shardFiles returns the names of the shards that have a file.
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

// allEntries returns all entries of the index, sorted by address. If the argument "damaged" is true, allEntries skips damaged and lost
// shards. Otherwise, a damaged or lost shard causes an error.
func (x *index) allEntries(damaged bool) ([]entry, error) {
	names := x.expectedShards()
	var err error
	if damaged || x.memory != nil {
		names, err = x.shardFiles()
	}
	if err != nil {
		return nil, err
	}
	var out []entry
	for _, name := range names {
		s, err := x.readShard(name)
		if err != nil && !damaged {
			return nil, err
		}
		out = slices.AppendSeq(out, maps.Values(s))
	}
	slices.SortFunc(out, func(a, b entry) int { return slices.CompareFunc(a.Addresses, b.Addresses, netip.Addr.Compare) })
	return out, nil
}

// rebuild() builds the index from all leases in the folder. If an attachment is in the old index, rebuild() copies its boot and its
// namespace. rebuild() assigns a new lease to the current boot, because the plugin cannot know whether its pod is dead.
func (x *index) rebuild(found map[netip.Addr]lease) {
	known, err := x.allEntries(true)
	byName := x.distribute(found, known)
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

// distribute() sorts the leases into shards.
func (x *index) distribute(found map[netip.Addr]lease, known []entry) map[string]shard {
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

// isDead reports whether the pod of an entry is certainly dead. A pod is dead if the node has booted since the ADD, or if the pod's
// namespace no longer exists.
func (x *index) isDead(e entry) bool { return e.Boot != x.boot || plugin.NetnsGone(e.Netns) }
