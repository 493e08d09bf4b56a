// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/poddevices"
)

// Damaged marks the placeholder of a record that cannot be read, for example because a newer version wrote it. It has all devices that
// the record's file or the kubelet's file lists, and is never stored.
const Damaged State = "damaged"

// standIn returns the placeholder of an unreadable record; ok is false if the claim's devices are unknown. If neither the record nor
// the kubelet's file has a device, the claim has none, because the kubelet writes its file before the driver prepares a claim.
func (f *recordFile) standIn(kubelet string) (r Record, ok bool) {
	r = Record{State: Damaged, Devices: f.readableDevices()}
	notes, err := KubeletClaims(kubelet)
	if kubelet == "" || err != nil {
		return r, len(r.Devices) > 0
	}
	i := slices.IndexFunc(notes, func(n KubeletClaim) bool { return n.UID == f.uid })
	if i < 0 {
		return r, true
	}
	for _, d := range notes[i].deviceList(f.uid) {
		if !r.Has(d.ID) {
			r.Devices = append(r.Devices, d)
		}
	}
	return r, len(r.Devices) > 0
}

// readableDevices returns the devices of an invalid record, or none if any of them lacks an address.
func (f *recordFile) readableDevices() []poddevices.Device {
	var r Record
	if json.Unmarshal(f.data, &r) != nil {
		return nil
	}
	for i, d := range r.Devices {
		if d.ID == "" {
			return nil
		}
		c := poddevices.Claim{}
		if d.Claim != nil {
			c = *d.Claim
		}
		c.UID, c.Name = f.uid, cmp.Or(c.Name, "(its record cannot be read)")
		r.Devices[i].Claim = &c
	}
	return r.Devices
}

// deviceList returns the claim's devices by the kubelet's file. Their PCI addresses come from their names in the ResourceSlice.
func (n KubeletClaim) deviceList(uid string) (list []poddevices.Device) {
	for _, d := range n.Devices {
		parts := strings.Split(d.DeviceName, "-")
		if len(parts) != 4 {
			return nil
		}
		list = append(list, poddevices.Device{ID: fmt.Sprintf("%s:%s:%s.%s", parts[0], parts[1], parts[2], parts[3]),
			Claim: &poddevices.Claim{UID: uid, Namespace: n.Namespace, Name: n.Name, Pool: d.PoolName, Device: d.DeviceName}})
	}
	return list
}
