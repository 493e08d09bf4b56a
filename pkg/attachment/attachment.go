// SPDX-License-Identifier: Apache-2.0

// Package attachment identifies one interface of one container in one network. It stores the record that a plugin keeps of its changes for
// that interface.
//
// Records are small JSON files /run/podlace/<network>/<plugin>-<hash of the key>, one per attachment and plugin. A plugin writes its record
// before its first change. DEL works from the record, whatever the current configuration says. The folder is on tmpfs, so it ends at a boot
// together with the kernel state that it describes.
//
// The lock order is the same everywhere: attachment, then network, then node, then VF (one at a time), then host-local's lease folder, then
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

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

const (
	format   = 1
	lockFile = ".lock"
)

// Key identifies an attachment.
type Key struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// KeyOf returns the key of a request's attachment.
func KeyOf(r *plugin.Request) Key { return Key{r.Network, r.ContainerID, r.IfName} }

// Hash returns 16 hexadecimal digits that identify the key. '/' separates the parts, because no part may contain it.
func (k Key) Hash() string {
	sum := k.sum("")
	return hex.EncodeToString(sum[:8])
}

func (k Key) sum(purpose string) [sha512.Size]byte {
	return sha512.Sum512([]byte(k.Network + "/" + k.ContainerID + "/" + k.IfName + purpose))
}

// offset returns the position of the attachment's lock in the network's lock file. All plugins of a chain share the lock: a runtime must
// not start the next plugin while one of them runs.
func (k Key) offset() int64 {
	sum := k.sum("/lock")
	return int64(binary.BigEndian.Uint64(sum[:8]) >> 1)
}

// HostVeth returns the name of the host side of the attachment's veth pair.
func (k Key) HostVeth() string { return HostVeth(k.Hash()) }

// HostVeth returns the name of the host side of the veth pair of the attachment with the hash.
func HostVeth(hash string) string { return "veth" + hash[:min(11, len(hash))] }

// Record is the stored state of a plugin for an attachment.
type Record struct {
	Format int `json:"format"`
	Key
	Plugin string `json:"plugin"`
	Pod    string `json:"pod,omitempty"`
	Netns  string `json:"netns,omitempty"`
	// WithLink reports that the recorded objects are deleted with the attachment's link, such as its qdiscs.
	WithLink bool            `json:"withLink,omitempty"`
	State    json.RawMessage `json:"state,omitempty"` // the plugin's own state

	Written time.Time `json:"-"` // time of the file
}

// Attachment is an attachment whose lock this process holds.
type Attachment struct {
	Key
	// WithLink is saved in the record: the plugin that deletes the link also deletes the record.
	WithLink bool

	plugin string
	pod    string
	netns  string
	dir    *store.Dir
	lock   *store.Lock
	saved  bool
}

// Open locks the attachment of r for all plugins, and creates the folder for its record.
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

// Writable returns an error if records of a network cannot be created. It creates none.
func Writable(network string) error { return store.Writable(folder(network)) }

// Close releases the lock.
func (a *Attachment) Close() {
	if a != nil {
		a.lock.Unlock()
		a.dir.Close()
	}
}

// LockFile returns the lock file for a child process to inherit. A DEL then waits for the child even if this process was killed.
func (a *Attachment) LockFile() *os.File {
	if a == nil {
		return nil
	}
	return a.lock.File()
}

func (a *Attachment) file() string { return a.plugin + "-" + a.Hash() }

// Save writes the record with the plugin's state.
func (a *Attachment) Save(state any) error {
	defer fault.Phase("record")()
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
		return plugin.Errorf(plugin.CodeConfig, "the attachment's state exceeds the size of a record: %w", err)
	}
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	a.saved = true
	return nil
}

// Resave saves the progress of a DEL. The record keeps its time for GC. A failure, such as a full disk, is not reported, because DEL then
// only repeats the work.
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

// Load reads the record's state. ok is false if there is none. An unreadable record counts as none, so that the caller computes the state
// from the key.
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

// Remove deletes the record, also an unreadable one.
func (a *Attachment) Remove() error {
	if a == nil {
		return nil
	}
	a.saved = false
	return a.dir.Remove(a.file())
}

// Plugins are the plugins that keep records.
var Plugins = []string{"bridge", "portmap", "bandwidth", "sriov"}

// ForgetWithLink deletes the attachment's records with WithLink, after the link was deleted.
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

// LockNetwork locks the state that all attachments of the network share.
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

// List returns a plugin's records in a network.
func List(network, plugin string) ([]Record, error) {
	all, _, err := read(network, plugin+"-")
	return slices.DeleteFunc(all, func(rec Record) bool { return rec.Plugin != plugin }), err
}

// All returns the records of all plugins in all networks.
func All() ([]Record, error) {
	records, _, err := Scan()
	return records, err
}

// Scan returns the records of all plugins in all networks, and the attachment files that are no records of this format.
func Scan() (records []Record, damaged []Damaged, err error) {
	networks, err := Networks()
	for _, network := range networks {
		found, bad, e := read(network, "")
		records, damaged, err = append(records, found...), append(damaged, bad...), errors.Join(err, e)
	}
	return records, damaged, err
}

// read returns a network's records whose names begin with the prefix, and the files that are not records of this format.
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
			continue // a DEL removed it meanwhile
		}
		if e == nil && (rec.Network != network || name != rec.Plugin+"-"+rec.Hash()) {
			e = errOther
		}
		if path := new(fs.PathError); errors.As(e, &path) {
			e = path.Err // Damaged contains the path
		}
		if e != nil {
			damaged = append(damaged, Damaged{network, name, e})
			continue
		}
		records = append(records, rec)
	}
	return records, damaged, err
}

// readRecord reads a record file. The error is fs.ErrNotExist if the file does not exist.
func readRecord(dir *store.Dir, name string) (Record, error) {
	data, written, err := dir.ReadWritten(name)
	if err != nil {
		return Record{}, err
	}
	rec, err := parse(data)
	rec.Written = written
	return rec, err
}

// errOther means that the record is for another attachment than its file name says.
var errOther = errors.New("it belongs to another attachment")

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

// formatError is the number of a record format that this version cannot read.
type formatError int

func (e formatError) Error() string {
	return fmt.Sprintf("its format is %d: this version of Podlace reads %d", int(e), format)
}

// isNewer reports whether an error means that a newer version wrote the record.
func isNewer(err error) bool {
	of, ok := errors.AsType[formatError](err)
	return ok && of > format
}

// ReferenceHash returns the hash from which the reference plugins derive names of chains and devices: SHA-512 of network and container ID
// in hexadecimal. The reference leaves out the interface name, so a second interface of a container conflicts. Podlace includes the name
// for interfaces other than eth0.
func (k Key) ReferenceHash() string {
	text := k.Network + k.ContainerID
	if k.IfName != "eth0" {
		text += k.IfName
	}
	sum := sha512.Sum512([]byte(text))
	return hex.EncodeToString(sum[:])
}

// ReferenceHashes returns the hashes in the names of possible residue of an attachment without a record: the reference's for any interface,
// and ours for interfaces other than eth0. It leaves out the reference's hash if the container's eth0 has a record of the plugin, because
// the hash then belongs to eth0.
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

// MAC returns a locally administered unicast MAC that is derived from the key and the end of the link.
func (k Key) MAC(end string) net.HardwareAddr { return localMAC(k.sum("/" + end)) }

// AddressMAC returns a locally administered unicast MAC that is derived from the network and the pod's first address. A neighbour entry
// stays valid for the next pod with the same first address. It may be wrong for additional addresses, which may come with another first
// address.
func (k Key) AddressMAC(addr netip.Addr) net.HardwareAddr {
	return localMAC(Key{Network: k.Network}.sum("/" + addr.String()))
}

func localMAC(sum [sha512.Size]byte) net.HardwareAddr {
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^1 | 2
	return mac
}
