// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"

	"github.com/podlace/podlace/pkg/claim"
)

// recoverDriver writes to the record which driver the device had before the claim, if the record was lost and the device has the
// claim's driver. It was lost if p.lost is true, or if a pod already has the device, which it normally gets after the record is
// written.
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

// formerDriver returns the driver that a device had before its claim, or "" if unknown. The kernel does not store it: it is the
// resource's, or the one with which the device last had an interface.
func (d *Driver) formerDriver(dev plannedDevice) string {
	return cmp.Or(dev.restoreTo, d.latestInventory().Last[dev.Address].Driver)
}
