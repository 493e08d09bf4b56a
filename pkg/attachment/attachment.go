// SPDX-License-Identifier: Apache-2.0

// Package attachment holds the identity of one interface of one container in one network, and the record that a plugin keeps of
// what it made for it.
//
// Records live under /run/podlace/<network>/<plugin>-<hash of the key>, one small JSON file for each attachment and plugin, written
// before the first change. DEL works from the record, whatever the configuration says by then. The folder is on tmpfs and
// so ends with the kernel state that it describes.
//
// Order of locks, everywhere: attachment, then network, then node, then VF (one at a time), then the lease folder of host-local, then
// iptables.
package attachment

import (
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

const (
	format   = 1
	lockFile = ".lock"
)

// Key names an attachment.
type Key struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// KeyOf returns the key of the attachment that a request is about.
func KeyOf(r *plugin.Request) Key { return Key{r.Network, r.ContainerID, r.IfName} }

// Hash returns 16 hexadecimal digits that stand for the key. The parts are separated by '/', which none of them may hold.
func (k Key) Hash() string {
	sum := k.sum("")
	return hex.EncodeToString(sum[:8])
}

func (k Key) sum(purpose string) [sha512.Size]byte {
	return sha512.Sum512([]byte(k.Network + "/" + k.ContainerID + "/" + k.IfName + purpose))
}

// offset is the place of the attachment's lock in the lock file of its network. All plugins of a chain share it: a runtime that
// still waits for one of them must not start the next.
func (k Key) offset() int64 {
	sum := k.sum("/lock")
	return int64(binary.BigEndian.Uint64(sum[:8]) >> 1)
}

// HostVeth returns the name of the host side of the attachment's veth pair.
func (k Key) HostVeth() string { return HostVeth(k.Hash()) }

// HostVeth returns the name of the host side of the veth pair of the attachment whose key has the hash.
func HostVeth(hash string) string { return "veth" + hash[:min(11, len(hash))] }

// Record is what a plugin remembers of an attachment.
type Record struct {
	Format int `json:"format"`
	Key
	Plugin string `json:"plugin"`
	Pod    string `json:"pod,omitempty"`
	Netns  string `json:"netns,omitempty"`
	// WithLink says that what the record names goes with the link of the attachment, such as its qdiscs.
	WithLink bool            `json:"withLink,omitempty"`
	State    json.RawMessage `json:"state,omitempty"` // the plugin's own

	Written time.Time `json:"-"` // of the file
}

// Attachment is an attachment that this process holds the lock of.
type Attachment struct {
	Key
	// WithLink is saved with the record: the plugin that deletes the link removes the record, too.
	WithLink bool

	plugin string
	pod    string
	netns  string
	dir    *store.Dir
	lock   *store.Lock
	saved  bool
}

// Open locks the attachment that r is about, against all plugins, and makes the folder for its record.
func Open(r *plugin.Request) (*Attachment, error) {
	dir, err := store.Make(folder(r.Network), 0o700)
	if err != nil {
		return nil, err
	}
	return lock(dir, KeyOf(r), r)
}

func folder(network string) string { return filepath.Join(store.Root, network) }

func lock(dir *store.Dir, k Key, r *plugin.Request) (*Attachment, error) {
	lock, err := dir.LockAt(lockFile, 0o600, k.offset())
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &Attachment{Key: k, plugin: r.Plugin, pod: r.Pod.String(), netns: r.NetnsPath, dir: dir, lock: lock}, nil
}

// Writable reports whether records of a network can be made, without making any.
func Writable(network string) error { return store.Writable(folder(network)) }

// Close gives the lock up.
func (a *Attachment) Close() {
	if a != nil {
		a.lock.Unlock()
		a.dir.Close()
	}
}

// LockFile returns the file that carries the lock, for a child process to inherit: a DEL then waits for the child even when this
// process was killed.
func (a *Attachment) LockFile() *os.File {
	if a == nil {
		return nil
	}
	return a.lock.File()
}

func (a *Attachment) file() string { return a.plugin + "-" + a.Hash() }

// Save writes the record with the plugin's own state in it.
func (a *Attachment) Save(state any) error {
	raw, err := json.Marshal(state)
	if err != nil {
		return err
	}
	data, err := json.Marshal(Record{Format: format, Key: a.Key, Plugin: a.plugin, Pod: a.pod, Netns: a.netns, WithLink: a.WithLink,
		State: raw})
	if err != nil {
		return err
	}
	data = append(data, '\n')
	if !a.saved {
		err = a.dir.Create(a.file(), data, 0o600)
	}
	if a.saved || errors.Is(err, fs.ErrExist) {
		err = a.dir.Write(a.file(), data, 0o600)
	}
	if errors.Is(err, store.ErrTooLarge) {
		return plugin.Errorf(plugin.CodeConfig, "the attachment has more than a record holds: %w", err)
	}
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	a.saved = true
	return nil
}

// Resave is Save for what DEL has done of its work. The record stays as old as it was, for GC. It may fail, as on a full disk: the work is
// then done once more.
func (a *Attachment) Resave(state any) {
	written, err := a.dir.Written(a.file())
	if err == nil {
		err = a.Save(state)
	}
	if err == nil {
		err = a.dir.SetWritten(a.file(), written)
	}
	if err != nil {
		slog.Warn("a record cannot be written", "record", filepath.Join(a.dir.Path(), a.file()), "error", err)
	}
}

// Load reads the record's state; ok is false when there is none. A record that cannot be read counts as none: the caller falls
// back to what it can compute from the key.
func (a *Attachment) Load(state any) (ok bool, err error) {
	_, ok, err = a.load(state)
	return ok, err
}

func (a *Attachment) load(state any) (rec Record, ok bool, err error) {
	data, written, err := a.dir.ReadWritten(a.file())
	if errors.Is(err, fs.ErrNotExist) {
		return rec, false, nil
	}
	if err != nil && !errors.Is(err, store.ErrTooLarge) && !errors.Is(err, store.ErrIrregular) {
		return rec, false, fmt.Errorf("read record: %w", err)
	}
	if err == nil {
		rec, err = parse(data)
		rec.Written = written
	}
	if err == nil && rec.Key != a.Key {
		err = errOther
	}
	if err == nil {
		err = json.Unmarshal(rec.State, state)
	}
	if err != nil {
		slog.Warn("a record cannot be read and is ignored", "record", filepath.Join(a.dir.Path(), a.file()), "error", err)
		return rec, false, nil
	}
	a.saved, a.WithLink = true, rec.WithLink
	return rec, true, nil
}

// Remove deletes the record, also one that cannot be read.
func (a *Attachment) Remove() error {
	if a == nil {
		return nil
	}
	a.saved = false
	return a.dir.Remove(a.file())
}

// Plugins are the plugins that keep records.
var Plugins = []string{"bridge", "portmap", "bandwidth", "sriov"}

// ForgetWithLink deletes the records of the attachment that say WithLink, once the link is gone.
func (a *Attachment) ForgetWithLink() error {
	if a == nil {
		return nil
	}
	var errs []error
	for _, name := range Plugins {
		if rec, err := readRecord(a.dir, name+"-"+a.Hash()); err == nil && rec.WithLink {
			errs = append(errs, a.dir.Remove(name+"-"+a.Hash()))
		}
	}
	return errors.Join(errs...)
}

// LockNetwork locks the network against other attachments that write what all of them share.
func (a *Attachment) LockNetwork() (unlock func(), err error) {
	lock, err := a.dir.LockAt(lockFile, 0o600, Key{Network: a.Network}.offset())
	if err != nil {
		return nil, err
	}
	return func() { _ = lock.Unlock() }, nil
}

// Recorded reports whether the plugin of r has a record of the attachment.
func Recorded(r *plugin.Request) bool {
	_, err := os.Lstat(filepath.Join(folder(r.Network), r.Plugin+"-"+KeyOf(r).Hash()))
	return err == nil
}

// List returns the records that a plugin has in a network.
func List(network, plugin string) ([]Record, error) {
	all, _, err := read(network, plugin+"-")
	return slices.DeleteFunc(all, func(rec Record) bool { return rec.Plugin != plugin }), err
}

// All returns the records of all plugins in all networks.
func All() ([]Record, error) {
	records, _, err := readAll()
	return records, err
}

func readAll() (records []Record, damaged []Damaged, err error) {
	networks, err := Networks()
	for _, network := range networks {
		found, bad, e := read(network, "")
		records, damaged, err = append(records, found...), append(damaged, bad...), errors.Join(err, e)
	}
	return records, damaged, err
}

// read returns the records of a network whose names begin with the prefix, and the files that are not records of this format.
func read(network, prefix string) (records []Record, damaged []Damaged, err error) {
	dir, err := store.Open(folder(network))
	if err != nil {
		return nil, nil, ignoreMissing(err)
	}
	defer dir.Close()
	names, err := dir.List()
	for _, name := range names {
		if strings.HasPrefix(name, ".") || !strings.HasPrefix(name, prefix) {
			continue
		}
		rec, e := readRecord(dir, name)
		if errors.Is(e, fs.ErrNotExist) {
			continue // its DEL was faster
		}
		if e == nil && (rec.Network != network || name != rec.Plugin+"-"+rec.Hash()) {
			e = errOther
		}
		if path := new(fs.PathError); errors.As(e, &path) {
			e = path.Err // Damaged has the path
		}
		if e != nil {
			damaged = append(damaged, Damaged{network, name, e})
			continue
		}
		records = append(records, rec)
	}
	return records, damaged, err
}

// readRecord reads a file that should be a record. The error is fs.ErrNotExist where there is none.
func readRecord(dir *store.Dir, name string) (Record, error) {
	data, written, err := dir.ReadWritten(name)
	if err != nil {
		return Record{}, err
	}
	rec, err := parse(data)
	rec.Written = written
	return rec, err
}

// errOther is the error for the record of another attachment than that of the file's name.
var errOther = errors.New("it is of another attachment")

func parse(data []byte) (Record, error) {
	if len(data) == 0 {
		return Record{}, errors.New("it is empty")
	}
	var rec Record
	if err := json.Unmarshal(data, &rec); err != nil {
		return Record{}, err
	}
	if rec.Format != format {
		return Record{}, formatError(rec.Format)
	}
	return rec, nil
}

// formatError is the format of a record that this version does not read.
type formatError int

func (e formatError) Error() string {
	return fmt.Sprintf("its format is %d: this version of Podlace reads %d", int(e), format)
}

// isNewer reports whether the error is that of a record that a newer version wrote.
func isNewer(err error) bool {
	of, ok := errors.AsType[formatError](err)
	return ok && of > format
}

// ReferenceHash returns the hexadecimal hash from which the reference plugins make the names of chains and devices:
// SHA-512 of network and container ID. They leave the interface name out, so that a second interface of one container clashes;
// here it counts for interfaces other than eth0.
func (k Key) ReferenceHash() string {
	text := k.Network + k.ContainerID
	if k.IfName != "eth0" {
		text += k.IfName
	}
	sum := sha512.Sum512([]byte(text))
	return hex.EncodeToString(sum[:])
}

// ReferenceHashes are the hashes in the names of what may be left of an attachment that has no record: the reference's for any
// interface, and ours for interfaces other than eth0. The reference's is not among them while eth0 of the container has a record of the
// plugin: then it is eth0's.
func (k Key) ReferenceHashes(plugin string) []string {
	eth0 := Key{k.Network, k.ContainerID, "eth0"}
	if k == eth0 {
		return []string{k.ReferenceHash()}
	}
	if _, err := os.Lstat(filepath.Join(folder(k.Network), plugin+"-"+eth0.Hash())); err == nil {
		return []string{k.ReferenceHash()}
	}
	return []string{k.ReferenceHash(), eth0.ReferenceHash()}
}

// MAC returns a locally administered unicast MAC address that is a function of the key and of the end of the link.
func (k Key) MAC(end string) net.HardwareAddr { return localMAC(k.sum("/" + end)) }

// AddressMAC returns a locally administered unicast MAC address that is a function of the network and of a pod's first address in it:
// whoever remembers its MAC is right about the next pod that has the same first address, but not about its other addresses, which may come
// with another first one.
func (k Key) AddressMAC(addr netip.Addr) net.HardwareAddr {
	return localMAC(Key{Network: k.Network}.sum("/" + addr.String()))
}

func localMAC(sum [sha512.Size]byte) net.HardwareAddr {
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^1 | 2
	return mac
}
