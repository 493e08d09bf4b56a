// SPDX-License-Identifier: Apache-2.0

// Package attachment identifies an attachment, which is one interface of one container in one network, and stores a record of what each
// plugin changed for it.
//
// A record is a small JSON file, /run/podlace/<network>/<plugin>-<hash of the key>. A plugin writes it before its first change, and DEL
// removes what it lists, whatever the current configuration says. It is on tmpfs, so a reboot removes it together with the kernel state
// that it describes.
//
// All code takes locks in the same order: attachment, network, node, VF (one at a time), host-local's lease folder, iptables.
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
	"syscall"
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

// KeyOf returns the key of the request's attachment.
func KeyOf(r *plugin.Request) Key { return Key{r.Network, r.ContainerID, r.IfName} }

// Hash returns 16 hexadecimal digits that identify the key. They are of its parts with '/' between them, which no part may contain.
func (k Key) Hash() string {
	sum := k.sum("")
	return hex.EncodeToString(sum[:8])
}

func (k Key) sum(purpose string) [sha512.Size]byte {
	return sha512.Sum512([]byte(k.Network + "/" + k.ContainerID + "/" + k.IfName + purpose))
}

// offset returns the position of the attachment's lock, which is one byte in the network's lock file. The plugins of a chain share it
// without waiting, because a runtime runs one after the other.
func (k Key) offset() int64 {
	sum := k.sum("/lock")
	return int64(binary.BigEndian.Uint64(sum[:8]) >> 1)
}

// HostVeth returns the name of the host side of the attachment's veth pair.
func (k Key) HostVeth() string { return HostVeth(k.Hash()) }

// HostVeth returns the name of the host side of the veth pair of the attachment whose key has this hash.
func HostVeth(hash string) string { return "veth" + hash[:min(11, len(hash))] }

// Record is the state that a plugin stored for an attachment.
type Record struct {
	Format int `json:"format"`
	Key
	Plugin string `json:"plugin"`
	Pod    string `json:"pod,omitempty"`
	Netns  string `json:"netns,omitempty"`
	// WithLink is true if the recorded objects, such as the link's qdiscs, are deleted together with the attachment's link.
	WithLink bool            `json:"withLink,omitempty"`
	State    json.RawMessage `json:"state,omitempty"` // the plugin's own state

	Written time.Time `json:"-"` // time of the file
}

// Attachment is an attachment that this process has locked.
type Attachment struct {
	Key
	// Save stores WithLink in the record: the plugin that deletes the link then also deletes the record.
	WithLink bool

	plugin string
	pod    string
	netns  string
	dir    *store.Dir
	lock   *store.Lock
	saved  bool
}

// Open locks the attachment of the request, so that no other plugin can change it, and creates the folder for the record.
func Open(r *plugin.Request) (*Attachment, error) {
	dir, err := store.Make(folder(r.Network), 0o700)
	if err != nil {
		return nil, err
	}
	for _, path := range []string{store.Root, dir.Path()} {
		if err := store.Restrict(path); err != nil {
			dir.Close()
			return nil, err
		}
	}
	return Waiting.lock(dir, KeyOf(r), r)
}

func folder(network string) string { return filepath.Join(store.Root, network) }

// Writable returns an error if no record can be created for a network. It creates none.
func Writable(network string) error { return store.Writable(folder(network)) }

// Close releases the lock.
func (a *Attachment) Close() {
	if a != nil {
		a.lock.Unlock()
		a.dir.Close()
	}
}

// LockFile returns the lock file, which a child process should inherit: if this process is killed, a later DEL still waits for the child.
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

// SaveProgress saves the progress of a DEL in the record, which keeps its modification time, because GC reads it. Errors are only logged:
// without the saved progress, the next DEL repeats some work.
func (a *Attachment) SaveProgress(state any) {
	written, err := a.dir.Written(a.file())
	if err == nil {
		err = a.Save(state)
	}
	if err == nil {
		err = a.dir.SetWritten(a.file(), written)
	}
	if err != nil {
		slog.Warn("could not save the progress of DEL in a record: the next DEL repeats some steps", "record", filepath.Join(a.dir.Path(), a.file()), "error", err)
	}
}

// Load decodes the state in the record. ok is false if there is none or it is unreadable; the caller then computes the state from the key.
func (a *Attachment) Load(state any) (ok bool, err error) {
	_, ok, err = a.load(state)
	return ok, err
}

func (a *Attachment) load(state any) (rec Record, ok bool, err error) {
	path := filepath.Join(a.dir.Path(), a.file())
	rec, err = readRecord(a.dir, a.file())
	if errors.Is(err, fs.ErrNotExist) {
		return rec, false, nil
	}
	if errno := syscall.Errno(0); errors.As(err, &errno) && errno != syscall.EISDIR {
		return rec, false, fmt.Errorf("read record %s: %w", path, err)
	}
	if err == nil {
		err = json.Unmarshal(rec.State, state)
	}
	if err != nil {
		slog.Warn("a record cannot be read and is ignored; deleting its pod removes it", "record", path, "error", err)
		return rec, false, nil
	}
	a.saved, a.WithLink = true, rec.WithLink
	return rec, true, nil
}

// Remove deletes the record, even if it is unreadable.
func (a *Attachment) Remove() error {
	if a == nil {
		return nil
	}
	a.saved = false
	return a.dir.Remove(a.file())
}

// Plugins returns the plugins that store records.
func Plugins() []string { return []string{"bridge", "portmap", "bandwidth", "sriov", "host-local"} }

// RemoveWithLink deletes other plugins' records of the attachment that have WithLink, after the caller deleted the link.
func (a *Attachment) RemoveWithLink() error {
	if a == nil {
		return nil
	}
	var errs []error
	for _, name := range Plugins() {
		if name == a.plugin {
			continue
		}
		if rec, err := readRecord(a.dir, name+"-"+a.Hash()); err == nil && rec.WithLink {
			errs = append(errs, a.dir.Remove(name+"-"+a.Hash()))
		}
	}
	return errors.Join(errs...)
}

// LockNetwork locks the state that all attachments of the network share.
func (a *Attachment) LockNetwork() (unlock func(), err error) {
	lock, err := a.dir.LockAt(store.LockTimeout, lockFile, 0o600, Key{Network: a.Network}.offset())
	if err != nil {
		return nil, err
	}
	return func() { _ = lock.Unlock() }, nil
}

// Recorded reports whether the plugin has a record of the request's attachment.
func Recorded(r *plugin.Request) bool {
	_, err := os.Lstat(filepath.Join(folder(r.Network), r.Plugin+"-"+KeyOf(r).Hash()))
	return err == nil
}

// List returns all records that a plugin has in a network.
func List(network, plugin string) ([]Record, error) {
	all, _, err := ReadRecords(network, plugin+"-")
	return slices.DeleteFunc(all, func(rec Record) bool { return rec.Plugin != plugin }), err
}

// Scan returns the records of all plugins in all networks, and the record files that cannot be decoded.
func Scan() (records []Record, damaged []Damaged, err error) {
	networks, err := Networks()
	for _, network := range networks {
		found, bad, e := ReadRecords(network, "")
		records, damaged, err = append(records, found...), append(damaged, bad...), errors.Join(err, e)
	}
	return records, damaged, err
}

// ReadRecords reads a network's record files whose names begin with the prefix. It also returns those that cannot be decoded.
func ReadRecords(network, prefix string) (records []Record, damaged []Damaged, err error) {
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
			continue // a DEL has removed the record in the meantime
		}
		if e != nil {
			damaged = append(damaged, Damaged{network, name, e})
			continue
		}
		records = append(records, rec)
	}
	return records, damaged, err
}

// readRecord reads a record file. If it does not exist, the error is fs.ErrNotExist. No error contains the path.
func readRecord(dir *store.Dir, name string) (rec Record, err error) {
	data, written, err := dir.ReadWritten(name)
	if path := new(fs.PathError); errors.As(err, &path) {
		err = path.Err
	}
	if err == nil {
		rec, err = parse(data)
	}
	if err == nil && (rec.Network != filepath.Base(dir.Path()) || name != rec.Plugin+"-"+rec.Hash()) {
		err = errOther
	}
	rec.Written = written
	return rec, err
}

// errOther means that the key in a record file does not match the hash in the file's name.
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

// isNewer reports whether an error means that a newer version of Podlace wrote the record.
func isNewer(err error) bool {
	of, ok := errors.AsType[formatError](err)
	return ok && of > format
}

// ReferenceHash returns the hash that the reference plugins use in the names of chains and devices: the SHA-512 of network and container ID
// in hexadecimal. They do not hash the interface name, so two interfaces of one container get the same hash. Podlace includes the name,
// except for eth0.
func (k Key) ReferenceHash() string {
	text := k.Network + k.ContainerID
	if k.IfName != "eth0" {
		text += k.IfName
	}
	sum := sha512.Sum512([]byte(text))
	return hex.EncodeToString(sum[:])
}

// ReferenceHashes returns the hashes that the names of an unrecorded attachment's chains and devices may contain: Podlace's and the
// reference plugins', which are equal for eth0. If the plugin has a record of the container's eth0, the latter belongs to eth0 and is left
// out.
func (k Key) ReferenceHashes(plugin string) []string {
	eth0 := Key{k.Network, k.ContainerID, "eth0"}
	if _, err := os.Lstat(filepath.Join(folder(k.Network), plugin+"-"+eth0.Hash())); err == nil || k == eth0 {
		return []string{k.ReferenceHash()}
	}
	return []string{k.ReferenceHash(), eth0.ReferenceHash()}
}

// MAC returns a locally administered unicast MAC address: a hash of the key and of end, which names one end of the link.
func (k Key) MAC(end string) net.HardwareAddr { return localMAC(k.sum("/" + end)) }

// AddressMAC returns a locally administered unicast MAC address: a hash of the network's name and the pod's first address. If the next pod
// gets the same first address, the neighbour entries of other hosts stay valid. Those of additional addresses may become wrong, since the
// next pod with such an address may have another first one and so another MAC.
func (k Key) AddressMAC(addr netip.Addr) net.HardwareAddr {
	return localMAC(Key{Network: k.Network}.sum("/" + addr.String()))
}

func localMAC(sum [sha512.Size]byte) net.HardwareAddr {
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^1 | 2
	return mac
}
