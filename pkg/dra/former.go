// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/sriov"
)

// recallDriver adds to the record of a claim that lost its record that a device has the claim's driver, and which driver it had before. A
// claim whose pod has the device had a record.
func (d *Driver) recallDriver(p *plan, dev planned, attached bool) {
	if !p.lost && !attached || !dev.rebound || dev.Driver != dev.driver {
		return
	}
	former := d.formerDriver(dev)
	switch former {
	case dev.driver:
		return
	case "":
		d.options.Log.Warn("the driver that a device had before its claim is not known: the device keeps the driver of the claim",
			"device", dev.Address.String(), "claim", dev.Namespace+"/"+dev.Name, "driver", dev.driver,
			"hint", "name the driver of the resource in the configuration, or bind it by hand when the claim has ended")
		return
	}
	p.record.Bound = append(p.record.Bound, claim.Binding{ID: dev.Address.String(), Driver: dev.driver, Former: former})
}

// formerDriver returns the driver that a device had before its claim: that of its resource, that with which it last had an interface here,
// or that of all other VFs of the PF which no pod has. It is "" if none of these is known. The kernel does not tell: driver_override names
// what an administrator wants and pci.Bind leaves it as it was.
func (d *Driver) formerDriver(dev planned) (driver string) {
	if dev.back != "" {
		return dev.back
	}
	i, _ := d.inventory()
	if last, ok := i.Last[dev.Address]; ok && last.Driver != "" {
		return last.Driver
	}
	if i.Snapshot == nil {
		return ""
	}
	records, err := d.records.List()
	if err != nil {
		return ""
	}
	claimed := map[string]bool{}
	for _, r := range records {
		for _, o := range r.Devices {
			claimed[o.ID] = true
		}
	}
	for _, vf := range i.Snapshot.VFs(dev.PF) {
		id := vf.Address.String()
		switch {
		case vf.Address == dev.Address, claimed[id], i.Held[id] != "", vf.Driver == "", sriov.Userspace(vf.Driver):
		case driver != "" && driver != vf.Driver:
			return ""
		default:
			driver = vf.Driver
		}
	}
	return driver
}
