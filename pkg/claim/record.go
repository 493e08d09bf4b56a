// SPDX-License-Identifier: Apache-2.0

// Package claim stores what the SR-IOV daemon prepared for ResourceClaims of Dynamic Resource Allocation, one record for each claim,
// and finds the devices that a pod has through claims. It is kept small, because a CNI plugin links it.
//
// The kubelet prepares a claim only once even if many pods share it, and its PodResources API omits a claim that no container refers
// to. Only its file dra_manager_state, which it writes before it creates a pod's sandbox, lists the pods of each claim (see Find).
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

	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

const (
	// Driver is the DRA driver's name in ResourceSlices, DeviceClasses and claims.
	Driver = "sriov.podlace.io"
	// Folder holds the claim records, each in a file named after the claim's UID.
	Folder = "/run/podlace-sriov/claims"

	format = 1
)

// State is the progress of Prepare for a claim.
type State string

const (
	// Preparing means that the devices are reserved for the claim, and that their drivers may be changing.
	Preparing State = "preparing"
	// Prepared means that pods of the claim may use the devices.
	Prepared State = "prepared"
)

// Record is the result of Prepare for a claim. It exists until the kubelet unprepares the claim, because the kubelet may create a pod's
// sandbox again without another Prepare.
type Record struct {
	Format int    `json:"format"`
	Writer string `json:"writer,omitempty"` // version of the program that wrote the record
	State  State  `json:"state"`
	// Time is when the record was created.
	Time time.Time `json:"time"`
	// Reserved lists the pods for which the claim was reserved when the record was written. More may have been added since.
	Reserved []Consumer `json:"reserved,omitempty"`
	// Bound lists the devices that get another kernel driver for the claim.
	Bound []Binding `json:"bound,omitempty"`
	// Devices lists the claim's devices of this driver, at least one. They hold data about the claim, not about a pod.
	Devices []poddevices.Device `json:"devices"`
}

// Binding is a device that has another kernel driver while its claim is prepared.
type Binding struct {
	ID     string `json:"id"` // PCI address
	Driver string `json:"driver"`
	Former string `json:"former,omitempty"` // driver to restore; "" for none
	MAC    string `json:"mac,omitempty"`    // of the interface that the device had before; "" if unknown
}

// Consumer is a Kubernetes object for which a claim is reserved. Resource is usually "pods".
type Consumer struct {
	Resource string `json:"resource"`
	Name     string `json:"name"`
	UID      string `json:"uid"`
}

// Claim returns the claim of a valid record.
func (r Record) Claim() poddevices.Claim { return *r.Devices[0].Claim }

// String returns the namespace and name of a valid record's claim for messages.
func (r Record) String() string { return "claim " + r.Claim().Namespace + "/" + r.Claim().Name }

// Has reports whether the claim owns a device. Administrative access is no ownership.
func (r Record) Has(id string) bool {
	return slices.ContainsFunc(r.Devices, func(d poddevices.Device) bool { return d.ID == id && d.Claim != nil && !d.Claim.Admin })
}

// Pod returns the name of the pod for which the claim was reserved, or "" if it was reserved for several pods or for something else.
func (r Record) Pod() string {
	if len(r.Reserved) == 1 && r.Reserved[0].Resource == "pods" {
		return r.Reserved[0].Name
	}
	return ""
}

func (r Record) reservedFor(podUID string) bool {
	return slices.ContainsFunc(r.Reserved, func(c Consumer) bool { return c.UID == podUID })
}

func (r Record) validate() error {
	switch {
	case r.Format != format:
		return fmt.Errorf("format %d: want %d", r.Format, format)
	case r.State != Preparing && r.State != Prepared:
		return fmt.Errorf("state %q: want preparing or prepared", r.State)
	case len(r.Devices) == 0:
		return errors.New("the record has no devices")
	case slices.ContainsFunc(r.Bound, func(b Binding) bool { return !r.Has(b.ID) || b.Driver == "" }):
		return errors.New("a bound device has no driver, or the claim does not hold it")
	}
	for i, d := range r.Devices {
		switch c := d.Claim; {
		case c == nil || c.UID == "" || c.Namespace == "" || c.Name == "" || c.Request == "" || c.Pool == "" || c.Device == "":
			return fmt.Errorf("device %d: the claim is incomplete", i)
		case c.UID != r.Devices[0].Claim.UID || c.Namespace != r.Devices[0].Claim.Namespace || c.Name != r.Devices[0].Claim.Name:
			return fmt.Errorf("device %d: it belongs to another claim", i)
		case d.ID == "" || d.Resource == "":
			return fmt.Errorf("device %d: address %q or resource %q is empty", i, d.ID, d.Resource)
		}
	}
	return nil
}

// decode parses the record of the claim with the given UID.
func decode(uid string, data []byte) (r Record, err error) {
	if err = json.Unmarshal(data, &r); err == nil {
		err = r.validate()
	}
	if err == nil && r.Claim().UID != uid {
		err = fmt.Errorf("it belongs to the claim with UID %s", r.Claim().UID)
	}
	if err != nil {
		return Record{}, fmt.Errorf("record of the claim with UID %s: %w", uid, err)
	}
	return r, nil
}

// Read returns the record of a claim, or fs.ErrNotExist (errors.Is) if it has none.
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

// List returns the readable records in a folder, sorted by the namespace and name of their claims, and an error about the others. The
// folder may be missing.
func List(folder string) (records []Record, err error) {
	err = NewCache(folder, "").walkFiles(func(f *recordFile) error {
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

// MakeFolder creates the folder of claim records. Its existence means that pods on this node may get devices through claims.
func MakeFolder(folder string) error {
	dir, err := store.Make(folder, 0o700)
	if err != nil {
		return fmt.Errorf("create the folder for the records of claims: %w", err)
	}
	return dir.Close()
}

// InUse reports whether pods on this node may get devices through claims.
func InUse(folder string) bool {
	info, err := os.Stat(folder)
	return err == nil && info.IsDir()
}

// Write stores a record in place of the claim's previous one and syncs it to disk. It sets the record's format and time if they are
// zero.
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

// Remove deletes the record of a claim. It is a no-op if there is none.
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

// Holder returns the record of the claim that owns a device, not counting administrative access, or a placeholder (see Damaged) if that
// record is unreadable. It fails if no readable record has the device and an unreadable one has unknown devices. kubelet is the root
// folder of the kubelet, or "" if unknown.
func Holder(folder, kubelet, id string) (r Record, ok bool, err error) {
	records, err := NewCache(folder, kubelet).List()
	for _, r := range records {
		if r.Has(id) {
			return r, true, nil
		}
	}
	if err != nil {
		err = fmt.Errorf("find the claim that has %s: %w; see %s", id, err, filepath.Clean(folder))
	}
	return Record{}, false, err
}
