// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

const (
	// JournalFolder has a journal for each VF that is attached or not restored yet, named after the VF's PCI address.
	JournalFolder = store.Root + "/" + attachment.Journals
	vfsLock       = ".lock"

	journalFormat = 1
	maxAltName    = 127 // ALTIFNAMSIZ of the kernel, without the final zero
)

// Holding is the content of a journal: the attachment that has the VF, and the VF's state before it.
type Holding struct {
	Format         int            `json:"format"`
	Address        pci.Address    `json:"address"`
	Owner          attachment.Key `json:"owner"`
	Pod            string         `json:"pod,omitempty"`
	Netns          string         `json:"netns"`
	Name           string         `json:"name"`           // interface name in the pod
	MAC            string         `json:"mac,omitempty"`  // MAC in the pod; "" if unknown
	Info           string         `json:"info,omitempty"` // path of its device-info file
	Since          time.Time      `json:"since"`
	Rebind         bool           `json:"rebind,omitempty"` // rebind the driver afterwards
	DeviceReported bool           `json:"told,omitempty"`   // the kernel reports the device of an interface (since Linux 5.14)
	Chained        bool           `json:"chained,omitempty"`
	Ended          bool           `json:"ended,omitempty"`         // no pod has the VF, but not all of it could be restored; without an owner after a claim
	Unrestored     string         `json:"unrestored,omitempty"`    // why no pod may get the ended VF
	LimitsPending  bool           `json:"limitsPending,omitempty"` // all of the ended VF is restored except its rates and its link state
	Former         formerState    `json:"former"`

	Claim *poddevices.Claim `json:"claim,omitempty"` // claim that assigned the VF
	VLAN  int               `json:"vlan,omitempty"`
	IPs   []netip.Prefix    `json:"ips,omitempty"`   // addresses in the pod
	Ready bool              `json:"ready,omitempty"` // ADD has finished; set only for a claim
	// Userspace is the driver that passes the VF to a user space program, without an interface; set only for a claim.
	Userspace string `json:"userspace,omitempty"`
}

// ownerText returns the pod, the container or the claim that has or had the VF.
func (j Holding) ownerText() string {
	switch {
	case j.Pod != "":
		return "pod " + j.Pod
	case j.Owner.ContainerID == "":
		return "an ended claim"
	}
	return "container " + j.Owner.ContainerID
}

// formerState is the state of a VF before its attachment.
type formerState struct {
	Driver string     `json:"driver,omitempty"`
	PF     *kernel.VF `json:"pf,omitempty"` // settings on the PF; nil if the PF is not in the plugin's namespace

	// Settings of the VF's interface. Name is "" if it had none.
	Name     string           `json:"name,omitempty"`
	AltNames []string         `json:"altnames,omitempty"`
	Alias    string           `json:"alias,omitempty"`
	MAC      net.HardwareAddr `json:"mac,omitempty"`
	MTU      int              `json:"mtu,omitempty"`
	Promisc  bool             `json:"promisc,omitempty"`
	AllMulti bool             `json:"allmulti,omitempty"`
	Up       bool             `json:"up,omitempty"`
	TxQueue  int              `json:"txqueuelen,omitempty"`
	Traits   kernel.Traits    `json:"traits,omitzero"`
	Features []string         `json:"features,omitempty"` // enabled features; empty if the kernel reports none
}

// lockedVF is a VF whose lock this process holds, at most one at a time.
type lockedVF struct {
	address pci.Address
	dir     *store.Dir
	lock    *store.Lock
}

func lock(a pci.Address) (*lockedVF, error) {
	dir, err := store.Make(JournalFolder, 0o700)
	if err != nil {
		return nil, err
	}
	return lockVF(dir, a)
}

// lockKnown locks a VF that may have a journal, or returns nil if the node has no folder of journals.
func lockKnown(a pci.Address) (*lockedVF, error) {
	dir, err := store.Open(JournalFolder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return lockVF(dir, a)
}

func lockVF(dir *store.Dir, a pci.Address) (*lockedVF, error) {
	lock, err := dir.LockAt(store.LockTimeout, vfsLock, 0o600, a.Number())
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &lockedVF{a, dir, lock}, nil
}

func (h *lockedVF) close() { h.lock.Unlock(); h.dir.Close() }

// load reads the journal of a VF; ok is false if there is none. An unreadable one is an error, because the VF's former settings are
// nowhere else.
func (h *lockedVF) load() (j Holding, ok bool, err error) {
	data, err := h.dir.Read(h.address.String())
	if errors.Is(err, fs.ErrNotExist) {
		return Holding{}, false, nil
	}
	if err == nil {
		j, err = parseJournal(data, h.address)
	}
	if err != nil {
		return Holding{}, false, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "journal of VF %s: %w", h.address, err),
			"'podlace sriov reset %s --yes' sets the VF to its defaults, and removes %s", h.address, filepath.Join(JournalFolder, h.address.String()))
	}
	return j, true, nil
}

func parseJournal(data []byte, a pci.Address) (j Holding, err error) {
	if err := json.Unmarshal(data, &j); err != nil {
		return Holding{}, err
	}
	f := j.Former
	switch {
	case j.Format != journalFormat:
		return Holding{}, fmt.Errorf("format %d: want %d", j.Format, journalFormat)
	case j.Address != a:
		return Holding{}, fmt.Errorf("it belongs to VF %q", j.Address)
	case !j.Ended && (j.Owner.Network == "" || j.Owner.ContainerID == "" || !filepath.IsAbs(j.Netns)):
		return Holding{}, errors.New("the owner is missing")
	case j.Info != "" && !filepath.IsAbs(j.Info):
		return Holding{}, fmt.Errorf("info %q: want an absolute path", j.Info)
	case j.LimitsPending && f.PF == nil:
		return Holding{}, errors.New("the former settings on the PF are missing")
	case f.MTU < 0 || f.Name != "" && len(f.MAC) == 0:
		return Holding{}, fmt.Errorf("invalid mtu %d or mac %q", f.MTU, f.MAC)
	}
	if err := plugin.ValidIfName(j.Name); err != nil && !j.Ended {
		return Holding{}, fmt.Errorf("name %q: %w", j.Name, err)
	}
	if f.Name != "" {
		err = plugin.ValidIfName(f.Name)
	}
	for _, name := range f.AltNames {
		if name == "" || len(name) > maxAltName || strings.Contains(name, "\x00") {
			err = fmt.Errorf("invalid alternative name %q", name)
		}
	}
	return j, err
}

// save writes the journal and syncs it to disk, because the VF's former settings are nowhere else. Attachment records are not synced: a
// lost one can be rebuilt from the kernel's objects, whose names come from the attachment's key.
func (h *lockedVF) save(j Holding) error {
	data, err := json.Marshal(j)
	if err == nil {
		err = h.dir.WriteSync(h.address.String(), append(data, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	return nil
}

// saveEnded notes in the journal that no pod has the VF, and why no pod may get it. If why is nil, only its limits are missing. The daemon,
// GC and the next ADD try to restore the rest.
func (h *lockedVF) saveEnded(j Holding, why error) (Holding, error) {
	ended := j
	ended.Ended, ended.Claim, ended.Unrestored, ended.LimitsPending = true, nil, "", why == nil
	if why != nil {
		ended.Unrestored = strings.ReplaceAll(why.Error(), "\n", "; ")
	}
	if err := h.save(ended); err != nil {
		return j, err
	}
	return ended, nil
}

// limitsPending reports whether all of an ended VF is restored except its rates and its link state.
func (j Holding) limitsPending() bool { return j.Ended && j.LimitsPending }

func (h *lockedVF) removeJournal() error { return h.dir.Remove(h.address.String()) }

// journalsOf returns the journals of an attachment's VFs.
func journalsOf(owner attachment.Key) ([]Holding, error) {
	all, err := Holdings()
	return slices.DeleteFunc(all, func(j Holding) bool { return j.Owner != owner }), err
}

// Holdings returns all readable journals, without taking the VFs' locks.
func Holdings() (all []Holding, err error) {
	dir, err := store.Open(JournalFolder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.List()
	for _, name := range names {
		a, e := pci.ParseAddress(name)
		if e != nil {
			continue // the lock file
		}
		data, e := dir.Read(name)
		if e != nil {
			continue // its DEL has removed it
		}
		if j, e := parseJournal(data, a); e == nil {
			all = append(all, j)
		}
	}
	return all, err
}
