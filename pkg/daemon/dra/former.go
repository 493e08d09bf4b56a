// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/sriov"
)

// recoverDriver writes to the claim's record which driver the device had before the claim. recoverDriver does so only if the record was
// lost and the device has the driver of the claim. The record was lost if p.lost is true, or if a pod already has the device. Normally, a
// pod gets a device only after the record is written.
func (d *Driver) recoverDriver(p *claimPlan, dev plannedDevice, attached bool) {
	if !p.lost && !attached || !dev.restores || dev.Driver != dev.driver {
		return
	}
	former := d.formerDriver(dev)
	switch former {
	case dev.driver:
		return
	case "":
		d.options.Log.Warn("the former driver of a device is unknown: the device will keep the driver of its claim",
			"device", dev.Address.String(), "claim", dev.Namespace+"/"+dev.Name, "driver", dev.driver,
			"hint", "set the resource's driver in the configuration, or bind the former driver manually after the claim has ended")
		return
	}
	p.record.Bound = append(p.record.Bound, claim.Binding{ID: dev.Address.String(), Driver: dev.driver, Former: former})
}

// formerDriver returns the driver that a device had before its claim. formerDriver returns "" if this driver is unknown. The kernel does
// not store this driver, so formerDriver tries three sources. The sources are, in this order: the driver of the resource, the driver of the
// device's last interface, and the common driver of all free VFs of the PF.
func (d *Driver) formerDriver(dev plannedDevice) (driver string) {
	if dev.restoreTo != "" {
		return dev.restoreTo
	}
	i := d.latestInventory()
	if last, ok := i.Last[dev.Address]; ok && last.Driver != "" {
		return last.Driver
	}
	records, err := d.records.List()
	if err != nil {
		return ""
	}
	for _, vf := range i.Snapshot.VFs(dev.PF) {
		id := vf.Address.String()
		claimed := slices.ContainsFunc(records, func(r claim.Record) bool { return r.Has(id) })
		switch {
		case vf.Address == dev.Address, claimed, i.Held[id] != "", vf.Driver == "", sriov.Userspace(vf.Driver):
		case driver != "" && driver != vf.Driver:
			return ""
		default:
			driver = vf.Driver
		}
	}
	return driver
}
