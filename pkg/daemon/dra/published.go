// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// Resources returns the slices that a node with these claim records publishes to an API server with all features. It does no I/O.
func Resources(i Inventory, node string, records []claim.Record, now time.Time) *resourceslice.DriverResources {
	return desiredState{Inventory: i, node: node, records: records, now: now, sliceFeatures: sliceFeatures{taints: true,
		counters: true}}.driverResources()
}

// Settings returns the VF settings for each allocation result of a claim, or nil for none; the claim overrides the class. It fails if
// Prepare would refuse the claim. Each device must belong to a resource of this driver. Settings does no I/O.
func Settings(c *resourceapi.ResourceClaim, targetOf func(device string) Target) (out []*vfconfig.Config, err error) {
	entries, err := readEntries(c)
	if err != nil {
		return nil, err
	}
	var devices []poddevices.Device
	for i, result := range c.Status.Allocation.Devices.Results {
		target := targetOf(result.Device)
		settings, err := configFor(entries, result, target)
		if err != nil {
			return nil, err
		}
		out = append(out, settings)
		devices = append(devices, poddevices.Device{Resource: target.Resource.FullName(), Claim: &poddevices.Claim{Result: i}})
	}
	_, err = checkConfig(c, entries, devices)
	return out, err
}

// Published returns the desired content of the ResourceSlices by the PCI address of the device. An API server without some features
// stores only a part.
func (d *Driver) Published() map[string]poddevices.Published {
	i := d.latestInventory()
	records, err := d.records.List()
	if err != nil {
		d.options.Log.Warn("cannot read records of claims: their devices may be shown as not published", "error", err)
	}
	out := map[string]poddevices.Published{}
	for _, s := range Resources(i, d.options.Node, records, time.Now()).Pools[d.options.Node].Slices {
		for _, device := range s.Devices {
			p := publishedText(device)
			p.Pool = d.options.Node
			out[p.Attributes[string(deviceattribute.StandardDeviceAttributePCIBusID)]] = p
		}
	}
	return out
}

// publishedText returns the attributes and taints that a slice contains for one device, as text.
func publishedText(device resourceapi.Device) poddevices.Published {
	p := poddevices.Published{Device: device.Name, Attributes: map[string]string{}}
	for name, a := range device.Attributes {
		full := string(name)
		if !strings.Contains(full, "/") {
			full = claim.Driver + "/" + full
		}
		p.Attributes[full] = attributeText(a)
	}
	for _, t := range device.Taints {
		text := t.Key
		if t.Value != "" {
			text += "=" + t.Value
		}
		p.Taints = append(p.Taints, fmt.Sprintf("%s:%s", text, t.Effect))
	}
	return p
}

// attributeText returns the value of an attribute as text. It supports only the types of attributes that this driver publishes.
func attributeText(a resourceapi.DeviceAttribute) string {
	switch {
	case a.StringValue != nil:
		return *a.StringValue
	case a.IntValue != nil:
		return strconv.FormatInt(*a.IntValue, 10)
	case a.BoolValue != nil:
		return strconv.FormatBool(*a.BoolValue)
	}
	return ""
}
