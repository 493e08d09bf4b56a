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

// Damaged is the state of a stand-in for an unreadable record, such as one of a newer version. It is never written. The stand-in has the
// devices that the record's file and the kubelet's file name.
const Damaged State = "damaged"

// standIn returns the known part of an unreadable record. ok is false if the claim's devices are unknown. A claim without devices in both
// files has none, because the kubelet records a claim before the driver prepares it.
func (f *file) standIn(kubelet string) (r Record, ok bool) {
	r = Record{State: Damaged, Devices: f.devices()}
	notes, err := KubeletClaims(kubelet)
	if kubelet == "" || err != nil {
		return r, len(r.Devices) > 0
	}
	i := slices.IndexFunc(notes, func(n KubeletClaim) bool { return n.UID == f.uid })
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

// devices returns the devices in an invalid record. It returns none unless every device has an address.
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

// devices returns the claim's devices from the kubelet's file. Their addresses are derived from their names in the ResourceSlice.
func (n KubeletClaim) devices(uid string) (list []allocation.Device) {
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
