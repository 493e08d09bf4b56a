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

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/devicefiles"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/pool"
	"github.com/podlace/podlace/pkg/sriov"
)

// Annotations of claims that Kubernetes sets.
const (
	podClaimAnnotation = resourceapi.PodResourceClaimAnnotation
	extendedAnnotation = resourceapi.ExtendedResourceClaimAnnotation
)

// plan is what Prepare is about to do for a claim.
type plan struct {
	record  claim.Record // with the state Preparing
	devices []planned    // those of the record, in its order
	lost    bool         // the claim was prepared before and has lost its record
}

// planned is a device of a plan.
type planned struct {
	pool.Device
	allocation.Claim
	resource string
	driver   string // that the device gets; "" for the one that it has
	back     string // driver that the device gets back, if the claim has it bound
	rebound  bool   // the claim has it bound, so that the former driver gets it back

	vfs []pci.Address // of a PF that is given out whole, which excludes them
}

// isOurs reports whether a claim has a device of this driver.
func isOurs(c *resourceapi.ResourceClaim) bool {
	return c.Status.Allocation == nil || slices.ContainsFunc(c.Status.Allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Driver == claim.Driver })
}

// plan reads the allocation of a claim, and refuses what cannot be prepared. It changes nothing. before is the record of the claim, nil
// without one.
func (d *Driver) plan(c *resourceapi.ResourceClaim, before *claim.Record) (p plan, err error) {
	if c.Status.Allocation == nil {
		return plan{}, errors.New("it is not allocated")
	}
	inventory, known := d.inventory()
	if !known {
		return plan{}, errors.New("the devices of this node are not known yet")
	}
	for i, result := range c.Status.Allocation.Devices.Results {
		if result.Driver != claim.Driver {
			continue
		}
		if result.Pool != d.options.Node {
			return plan{}, fmt.Errorf("device %s: pool %q: want that of this node, %q", result.Device, result.Pool, d.options.Node)
		}
		one, err := d.planDevice(inventory, c, i, before)
		if err != nil {
			return plan{}, fmt.Errorf("request %s: %w", result.Request, err)
		}
		p.devices = append(p.devices, one.planned)
		p.record.Devices = append(p.record.Devices, one.recorded)
	}
	warnings, err := checkConfig(c, p.record.Devices)
	for _, text := range warnings {
		d.options.Log.Warn(text, "claim", c.Namespace+"/"+c.Name)
	}
	if err != nil {
		return plan{}, err
	}
	p.record.State, p.record.Writer, p.record.Extended = claim.Preparing, plugin.Version, c.Annotations[extendedAnnotation] == "true"
	for _, r := range c.Status.ReservedFor {
		p.record.Reserved = append(p.record.Reserved, claim.Consumer{Resource: r.Resource, Name: r.Name, UID: string(r.UID)})
	}
	return p, p.covers(before)
}

// covers returns an error if the record of a claim has a device that is not in the plan.
func (p plan) covers(before *claim.Record) error {
	if before == nil {
		return nil
	}
	for _, dev := range before.Devices {
		if _, ok := recorded(&p.record, dev.Claim.Device, dev.Claim.Request); !ok {
			return fmt.Errorf("it is still prepared with device %s, of an allocation that has ended: its pod has not ended", dev.ID)
		}
	}
	return nil
}

// recorded returns the device of a record that was allocated for a request.
func recorded(r *claim.Record, name, request string) (allocation.Device, bool) {
	if r == nil {
		return allocation.Device{}, false
	}
	i := slices.IndexFunc(r.Devices, func(d allocation.Device) bool { return d.Claim.Device == name && d.Claim.Request == request })
	if i < 0 {
		return allocation.Device{}, false
	}
	return r.Devices[i], true
}

// one is a device of a plan and of its record.
type one struct {
	planned  planned
	recorded allocation.Device
}

// planDevice plans the device of a result, which is of this driver and node.
func (d *Driver) planDevice(i Inventory, c *resourceapi.ResourceClaim, result int, before *claim.Record) (one, error) {
	r := c.Status.Allocation.Devices.Results[result]
	p := planned{Claim: allocation.Claim{UID: string(c.UID), Namespace: c.Namespace, Name: c.Name,
		PodClaim: c.Annotations[podClaimAnnotation], Request: r.Request, Result: result, Pool: r.Pool, Device: r.Device,
		Admin: r.AdminAccess != nil && *r.AdminAccess}}
	if r.ShareID != nil {
		p.ShareID = string(*r.ShareID)
	}
	device, in, err := i.find(r.Device)
	if was, ok := recorded(before, r.Device, r.Request); err != nil && ok {
		// Its resource is not given out by claims any more. The claim keeps what it has.
		a, err := pci.ParseAddress(was.ID)
		p.Device, p.resource = pool.Device{Device: pci.Device{Address: a}}, was.Resource
		return one{p, allocation.Device{Resource: was.Resource, ID: was.ID, Claim: &p.Claim, Config: was.Config}}, err
	}
	if err != nil {
		return one{}, err
	}
	config, err := configFor(c.Status.Allocation, r, in.Resource)
	if err != nil {
		return one{}, err
	}
	p.Device, p.resource = device, in.Name
	if !p.Admin {
		if device.Whole == 0 { // the driver is for VFs
			p.driver, p.back = in.Resource.Driver, in.Resource.Driver
		}
		p.vfs = i.vfsOf(p)
		if config != nil && config.Driver != "" {
			p.driver, p.rebound = config.Driver, true
		}
		if by, ok := i.Held[device.Address.String()]; ok {
			return one{}, fmt.Errorf("VF %s is of %s", device.Address, by)
		}
		err = d.usable(p)
	}
	return one{p, allocation.Device{Resource: in.Name, ID: device.Address.String(), Claim: &p.Claim, Config: config}}, err
}

// usable refuses a device that a pod could not use.
func (d *Driver) usable(p planned) error {
	driver := cmp.Or(p.driver, p.Driver)
	switch {
	case p.Unreadable != "":
		return fmt.Errorf("device %s cannot be read: %s", p.Address, p.Unreadable)
	case driver == "":
		return fmt.Errorf("device %s has no driver, and neither its resource nor the claim names one", p.Address)
	case d.options.CDI == "" && sriov.Userspace(driver):
		return fmt.Errorf("device %s has driver %s, whose device files a claim gives to a container by CDI only: the daemon has no --cdi-dir",
			p.Address, driver)
	case d.options.CDI == "" && len(devicefiles.Nodes(p.Device)) > 0:
		return fmt.Errorf("device %s comes with device files, which a claim gives to a container by CDI only: the daemon has no --cdi-dir",
			p.Address)
	case p.driver != "" && p.driver != p.Driver && !p.IsVF():
		return fmt.Errorf("device %s keeps driver %s and does not get %s: it is no VF", p.Address, p.Driver, p.driver)
	}
	return nil
}

// find returns a device by its name in the slices, and the pool that has it.
func (i Inventory) find(name string) (pool.Device, pool.Pool, error) {
	for _, p := range i.Pools {
		for _, d := range p.Devices {
			if DeviceName(d.Address) == name {
				return d, p, nil
			}
		}
	}
	return pool.Device{}, pool.Pool{}, fmt.Errorf(`device %s is gone, or of no resource with "api": "dra"`, name)
}

// addresses returns the devices that the claim of a plan owns, and those that they exclude.
func (p plan) addresses() (list []pci.Address) {
	for _, dev := range p.devices {
		if !dev.Admin {
			list = append(append(list, dev.Address), dev.vfs...)
		}
	}
	return list
}

// answer tells the kubelet of the devices. The CDI device of a request goes with the first device of the request.
func (d *Driver) answer(p plan) (list []kubeletplugin.Device) {
	told := map[string]bool{}
	for _, dev := range p.devices {
		out := kubeletplugin.Device{Requests: []string{dev.Request}, PoolName: dev.Pool, DeviceName: dev.Claim.Device}
		if dev.ShareID != "" {
			out.ShareID = new(types.UID(dev.ShareID))
		}
		if d.options.CDI != "" && !told[dev.Request] {
			out.CDIDeviceIDs = []string{cdiName(dev.UID, dev.Request)}
			told[dev.Request] = true
		}
		list = append(list, out)
	}
	return list
}
