// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/devicefiles"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// claimPlan describes what Prepare does for one claim.
type claimPlan struct {
	record  claim.Record    // with state Preparing
	devices []plannedDevice // in the order of the record
	lost    bool            // the claim was prepared earlier and its record is lost
}

type plannedDevice struct {
	pool.Device
	poddevices.Claim
	resource  string
	config    *vfconfig.Config
	driver    string // driver to bind; "" keeps the current driver
	restoreTo string // driver of the resource, which is bound again after the claim; "" restores the current driver
	fresh     bool   // neither a record nor a pod of the claim had the device
	restores  bool   // the claim chose the driver, so the former one is restored

	held *sriov.Holding // attachment to a pod of the claim, or nil

	vfs []pci.Address // VFs that the device excludes, if it is a PF offered as a whole
}

// planClaim plans a claim's allocation without changing anything, or fails if the claim cannot be prepared. before is its existing
// record, or nil.
func (d *Driver) planClaim(c *resourceapi.ResourceClaim, before *claim.Record) (p claimPlan, err error) {
	if c.Status.Allocation == nil {
		return claimPlan{}, errors.New("the claim is not allocated")
	}
	inventory := d.latestInventory()
	entries, err := readEntries(c)
	if err != nil {
		return claimPlan{}, err
	}
	for i, result := range c.Status.Allocation.Devices.Results {
		if result.Driver != claim.Driver {
			continue
		}
		if result.Pool != d.options.Node {
			return claimPlan{}, fmt.Errorf("device %s: pool %q: want %q, the pool of this node", result.Device, result.Pool, d.options.Node)
		}
		one, err := d.planDevice(inventory, c, entries, i, before)
		if err != nil {
			return claimPlan{}, fmt.Errorf("request %s: %w", result.Request, err)
		}
		p.devices = append(p.devices, one)
		p.record.Devices = append(p.record.Devices, poddevices.Device{Resource: one.resource, ID: one.Address.String(), Claim: &one.Claim,
			Config: one.config})
	}
	if len(p.devices) == 0 {
		return claimPlan{}, errors.New("the claim has no device of driver " + claim.Driver)
	}
	warnings, err := checkConfig(c, entries, p.record.Devices)
	for _, text := range warnings {
		d.options.Log.Warn(text, "claim", c.Namespace+"/"+c.Name)
	}
	if err != nil {
		return claimPlan{}, err
	}
	p.record.State, p.record.Writer = claim.Preparing, plugin.Version
	for _, r := range c.Status.ReservedFor {
		p.record.Reserved = append(p.record.Reserved, claim.Consumer{Resource: r.Resource, Name: r.Name, UID: string(r.UID)})
	}
	return p, p.checkCovers(before)
}

// checkCovers returns an error if the existing record of a claim has a device that is missing from the plan.
func (p claimPlan) checkCovers(before *claim.Record) error {
	if before == nil {
		return nil
	}
	for _, dev := range before.Devices {
		if _, ok := recordedDevice(&p.record, dev.Claim.Device, dev.Claim.Request); !ok {
			return fmt.Errorf("the claim is still prepared with device %s of an earlier allocation, whose pod has not ended", dev.ID)
		}
	}
	return nil
}

// recordedDevice searches a record for the device that was allocated for a request.
func recordedDevice(r *claim.Record, name, request string) (poddevices.Device, bool) {
	if r == nil {
		return poddevices.Device{}, false
	}
	i := slices.IndexFunc(r.Devices, func(d poddevices.Device) bool { return d.Claim.Device == name && d.Claim.Request == request })
	if i < 0 {
		return poddevices.Device{}, false
	}
	return r.Devices[i], true
}

// planDevice makes the plan for the device of one allocation result. The allocation result must belong to this driver and this node.
func (d *Driver) planDevice(i Inventory, c *resourceapi.ResourceClaim, entries []configEntry, result int, before *claim.Record) (
	plannedDevice, error) {
	r := c.Status.Allocation.Devices.Results[result]
	p := plannedDevice{Claim: poddevices.Claim{UID: string(c.UID), Namespace: c.Namespace, Name: c.Name,
		PodClaim: c.Annotations[resourceapi.PodResourceClaimAnnotation], Request: r.Request, Result: result, Pool: r.Pool, Device: r.Device,
		Admin: isAdmin(r)}}
	if r.ShareID != nil {
		p.ShareID = string(*r.ShareID)
	}
	device, in, err := i.findDevice(r.Device)
	if was, ok := recordedDevice(before, r.Device, r.Request); err != nil && ok {
		// findDevice fails if an admin has removed "api": "dra" from the resource. The claim keeps the device that it got from it.
		p.resource, p.config = was.Resource, was.Config
		p.Address, err = pci.ParseAddress(was.ID)
		return p, err
	}
	if err != nil {
		return p, err
	}
	p.Device, p.resource = device, in.Name
	target := Target{in.Resource, kindOf(device.Device), driverOf(in.Resource, device.Device)}
	if p.config, err = configFor(entries, r, target); err != nil || p.Admin {
		return p, err
	}
	if device.Whole == 0 { // only VFs get the driver
		p.driver, p.restoreTo = in.Resource.Driver, in.Resource.Driver
	}
	p.vfs = i.vfsOf(p)
	if p.config != nil && p.config.Driver != "" {
		p.driver, p.restores = p.config.Driver, true
	}
	if by, ok := i.Held[device.Address.String()]; ok {
		return p, fmt.Errorf("VF %s belongs to %s", device.Address, by)
	}
	return p, d.checkUsable(p)
}

// checkUsable returns an error if a pod cannot use the planned device.
func (d *Driver) checkUsable(p plannedDevice) error {
	driver := cmp.Or(p.driver, p.Driver)
	switch {
	case p.Unreadable != "":
		return fmt.Errorf("cannot read device %s: %s", p.Address, p.Unreadable)
	case driver == "":
		return fmt.Errorf("device %s has no driver: set \"driver\" in its resource or in the claim", p.Address)
	case d.options.CDI == "" && pci.IsUserspace(driver):
		return fmt.Errorf("device %s has driver %s, so its device files need CDI: start the daemon with --cdi-dir",
			p.Address, driver)
	case d.options.CDI == "" && len(devicefiles.Nodes(p.Device)) > 0:
		return fmt.Errorf("device %s has device files, which need CDI: start the daemon with --cdi-dir",
			p.Address)
	case p.driver != "" && p.driver != p.Driver && p.IsPF():
		return fmt.Errorf("cannot change the driver of device %s from %s to %s: it is a PF", p.Address, p.Driver, p.driver)
	}
	return nil
}

// findDevice returns the device that has the given name in the ResourceSlices, and the pool of the device.
func (i Inventory) findDevice(name string) (pool.Device, pool.Pool, error) {
	for _, p := range i.Pools {
		for _, d := range p.Devices {
			if DeviceName(d.Address) == name {
				return d, p, nil
			}
		}
	}
	return pool.Device{}, pool.Pool{}, fmt.Errorf(`device %s does not exist, or no resource with "api": "dra" has it`, name)
}

// lockedAddresses returns the devices that the claim of the plan will own, whose locks it needs, with the VFs of a PF that is offered
// as a whole.
func (p claimPlan) lockedAddresses() (list []pci.Address) {
	for _, dev := range p.devices {
		if !dev.Admin {
			list = append(append(list, dev.Address), dev.vfs...)
		}
	}
	return list
}

// answerFor returns the devices of a plan for the kubelet. Only the first device of a request has the request's CDI device.
func (d *Driver) answerFor(p claimPlan) (list []kubeletplugin.Device) {
	answered, inventory := map[string]bool{}, d.latestInventory()
	for _, dev := range p.devices {
		out := kubeletplugin.Device{Requests: []string{dev.Request}, PoolName: dev.Pool, DeviceName: dev.Claim.Device,
			Metadata: metadataOf(inventory.attributesOf(dev.resource, dev.Device), dev.held)}
		if dev.ShareID != "" {
			out.ShareID = new(types.UID(dev.ShareID))
		}
		if d.options.CDI != "" && !answered[dev.Request] {
			out.CDIDeviceIDs = []string{cdiName(dev.UID, dev.Request)}
			answered[dev.Request] = true
		}
		list = append(list, out)
	}
	return list
}
