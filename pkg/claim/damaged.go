// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/allocation"
)

// Damaged is the state of a stand-in for a record that cannot be read, such as one of a newer version. It is never written. A stand-in has
// the devices that the claim holds, as far as the file itself and the kubelet's file name them.
const Damaged State = "damaged"

// standIn returns what is known of a claim whose record cannot be read. ok is false if its devices are not known. A claim that neither the
// file nor the kubelet gives a device has none: the kubelet writes a claim down before it has the claim prepared.
func (f *file) standIn(kubelet string) (r Record, ok bool) {
	r = Record{State: Damaged, Devices: f.devices()}
	notes, err := Notes(kubelet)
	if kubelet == "" || err != nil {
		return r, len(r.Devices) > 0
	}
	i := slices.IndexFunc(notes, func(n Note) bool { return n.UID == f.uid })
	if i < 0 {
		return r, true
	}
	for _, d := range notes[i].devices(f.uid) {
		if !r.Has(d.ID) {
			r.Devices = append(r.Devices, d)
		}
	}
	return r, len(r.Devices) > 0
}

// devices returns the devices that a record names which is not valid, none unless each has an address.
func (f *file) devices() []allocation.Device {
	var r Record
	if json.Unmarshal(f.data, &r) != nil {
		return nil
	}
	for i, d := range r.Devices {
		if d.ID == "" {
			return nil
		}
		c := allocation.Claim{}
		if d.Claim != nil {
			c = *d.Claim
		}
		c.UID, c.Name = f.uid, cmp.Or(c.Name, "(its record cannot be read)")
		r.Devices[i].Claim = &c
	}
	return r.Devices
}

// devices returns the devices of a claim that the kubelet has written down. Their names in slices are made of their addresses.
func (n Note) devices(uid string) (list []allocation.Device) {
	for _, d := range n.Devices {
		parts := strings.Split(d.DeviceName, "-")
		if len(parts) != 4 {
			return nil
		}
		list = append(list, allocation.Device{ID: fmt.Sprintf("%s:%s:%s.%s", parts[0], parts[1], parts[2], parts[3]),
			Claim: &allocation.Claim{UID: uid, Namespace: n.Namespace, Name: n.Name, Pool: d.PoolName, Device: d.DeviceName}})
	}
	return list
}
