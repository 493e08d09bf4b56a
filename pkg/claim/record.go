// SPDX-License-Identifier: Apache-2.0

// Package claim keeps what the SR-IOV daemon has prepared for ResourceClaims of Dynamic Resource Allocation, a record for each claim, and
// finds the devices that a pod has by claims. It is small because a CNI plugin links it.
//
// The kubelet prepares a claim once, however many pods share it, and its PodResources API says nothing of a claim that no container names.
// Which pods have a claim stands in one file of the kubelet alone, which it writes before a pod's sandbox is made (see Find).
package claim

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/store"
)

const (
	// Driver is the name of the driver in ResourceSlices, DeviceClasses and claims.
	Driver = "sriov.podlace.io"
	// Folder holds the records, in files named by the claims' UIDs.
	Folder = "/run/podlace-sriov/claims"

	format = 1
)

// State is how far a claim has come.
type State string

const (
	// Preparing is for devices that are reserved for the claim and may be changing.
	Preparing State = "preparing"
	// Prepared is for devices that pods of the claim may have.
	Prepared State = "prepared"
)

// Record is what was prepared for a claim. It stays until the kubelet has all devices given back: a sandbox may be made again without
// another preparation.
type Record struct {
	Format int    `json:"format"`
	Writer string `json:"writer,omitempty"` // version of the program
	State  State  `json:"state"`
	// Time is when the record was made.
	Time time.Time `json:"time"`
	// Reserved are the consumers that the claim had at that time. More pods may have come since.
	Reserved []Consumer `json:"reserved,omitempty"`
	// Extended is set for a claim that the scheduler made for containers that request an extended resource.
	Extended bool `json:"extended,omitempty"`
	// Bound are the devices that get another driver for the claim.
	Bound []Binding `json:"bound,omitempty"`
	// Devices are those of this driver, at least one, each with the same claim. They name no pod.
	Devices []allocation.Device `json:"devices"`
}

// Binding is a device that has another driver while its claim is prepared.
type Binding struct {
	ID     string `json:"id"` // its PCI address
	Driver string `json:"driver"`
	Former string `json:"former,omitempty"` // gets the device back; "" for none
}

// Consumer is an object that a claim is reserved for: of the resource pods, or of another one.
type Consumer struct {
	Resource string `json:"resource"`
	Name     string `json:"name"`
	UID      string `json:"uid"`
}

// Claim returns the claim of a record that is valid.
func (r Record) Claim() allocation.Claim { return *r.Devices[0].Claim }

// String names the claim of a record that is valid, as kubectl does.
func (r Record) String() string { return "claim " + r.Claim().Namespace + "/" + r.Claim().Name }

// Has reports whether the claim holds a device. Access of an administrator holds none.
func (r Record) Has(id string) bool {
	return slices.ContainsFunc(r.Devices, func(d allocation.Device) bool { return d.ID == id && d.Claim != nil && !d.Claim.Admin })
}

func (r Record) reservedFor(podUID string) bool {
	return slices.ContainsFunc(r.Reserved, func(c Consumer) bool { return c.UID == podUID })
}

func (r Record) validate() error {
	switch {
	case r.Format != format:
		return fmt.Errorf("format %d: want %d", r.Format, format)
	case r.State != Preparing && r.State != Prepared:
		return fmt.Errorf("state %q", r.State)
	case len(r.Devices) == 0:
		return errors.New("it has no devices")
	case slices.ContainsFunc(r.Bound, func(b Binding) bool { return !r.Has(b.ID) || b.Driver == "" }):
		return errors.New("a device that it does not hold was bound, or one to no driver")
	}
	for i, d := range r.Devices {
		switch c := d.Claim; {
		case c == nil || c.UID == "" || c.Namespace == "" || c.Name == "" || c.Request == "" || c.Pool == "" || c.Device == "":
			return fmt.Errorf("device %d: the claim is incomplete", i)
		case c.UID != r.Devices[0].Claim.UID || c.Namespace != r.Devices[0].Claim.Namespace || c.Name != r.Devices[0].Claim.Name:
			return fmt.Errorf("device %d: it is of another claim", i)
		case d.ID == "" || d.Resource == "":
			return fmt.Errorf("device %d: address %q of resource %q", i, d.ID, d.Resource)
		}
	}
	return nil
}

// decode reads the record in the file of a UID.
func decode(uid string, data []byte) (r Record, err error) {
	if err = json.Unmarshal(data, &r); err == nil {
		err = r.validate()
	}
	if err == nil && r.Claim().UID != uid {
		err = fmt.Errorf("it is of the claim with UID %s", r.Claim().UID)
	}
	if err != nil {
		return Record{}, fmt.Errorf("record of the claim with UID %s: %w", uid, err)
	}
	return r, nil
}

// Read returns the record of a claim; without one the error is fs.ErrNotExist (errors.Is).
func Read(folder, uid string) (Record, error) {
	dir, err := store.Open(folder)
	if err != nil {
		return Record{}, err
	}
	defer dir.Close()
	data, err := dir.Read(uid)
	if err != nil {
		return Record{}, err
	}
	return decode(uid, data)
}

// List returns the records of a folder, which need not exist, by the claims' namespaces and names, and why others cannot be read.
func List(folder string) (records []Record, err error) {
	err = NewCache(folder, "").walk(func(f *file) error {
		r, err := f.decode()
		if err == nil {
			records = append(records, r)
		}
		return err
	})
	slices.SortFunc(records, func(a, b Record) int {
		return cmp.Or(strings.Compare(a.Claim().Namespace, b.Claim().Namespace), strings.Compare(a.Claim().Name, b.Claim().Name),
			strings.Compare(a.Claim().UID, b.Claim().UID))
	})
	return records, err
}

// Begin makes the folder of records. Where it is, pods may get devices by claims.
func Begin(folder string) error {
	dir, err := store.Make(folder, 0o700)
	if err != nil {
		return fmt.Errorf("folder of the records of claims: %w", err)
	}
	return dir.Close()
}

// InUse reports whether pods may get devices by claims on this node.
func InUse(folder string) bool {
	info, err := os.Stat(folder)
	return err == nil && info.IsDir()
}

// Write puts a record in the place of the one that its claim may have, and returns when a crash of the kernel leaves it there. Format and
// time are set if they are zero.
func Write(folder string, r Record) error {
	r.Format = format
	if r.Time.IsZero() {
		r.Time = time.Now().UTC().Truncate(time.Second)
	}
	if err := r.validate(); err != nil {
		return fmt.Errorf("write the record of a claim: %w", err)
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	dir, err := store.Make(folder, 0o700)
	if err != nil {
		return fmt.Errorf("write the record of %s: %w", r, err)
	}
	defer dir.Close()
	if err := dir.WriteSync(r.Claim().UID, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the record of %s: %w", r, err)
	}
	return nil
}

// Remove deletes the record of a claim, which need not exist.
func Remove(folder, uid string) error {
	dir, err := store.Open(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Remove(uid)
}

// Holder returns the record of a claim that has a device, or its stand-in (Damaged). It is an error if some record cannot be read, its
// devices are not known, and no other record has the device. Access of an administrator is none. kubelet is the kubelet's root folder; ""
// if it is not known.
func Holder(folder, kubelet, id string) (r Record, ok bool, err error) {
	records, err := NewCache(folder, kubelet).List()
	for _, r := range records {
		if r.Has(id) {
			return r, true, nil
		}
	}
	if err != nil {
		err = fmt.Errorf("whether a claim has %s: %w; see %s", id, err, filepath.Clean(folder))
	}
	return Record{}, false, err
}
