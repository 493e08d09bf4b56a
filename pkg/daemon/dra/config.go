// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// configEntry is an entry for this driver in the configuration list of a claim's allocation.
type configEntry struct {
	vfconfig.Entry
	api  resourceapi.DeviceAllocationConfiguration
	path string // class and path of its parameters in the class, or path in the claim, for errors
}

// ofClaim reports whether the entry comes from the claim, and not from a class.
func (e configEntry) ofClaim() bool { return e.api.Source == resourceapi.AllocationConfigSourceClaim }

// readEntries returns the config entries for this driver, those of classes before those of the claim, each in the order of the
// allocation.
func readEntries(c *resourceapi.ResourceClaim) (entries []configEntry, err error) {
	inClaim := -1
	for i, entry := range c.Status.Allocation.Devices.Config {
		at := ""
		switch entry.Source {
		case resourceapi.AllocationConfigSourceClass:
			at = pathInClass(c, i)
		case resourceapi.AllocationConfigSourceClaim:
			inClaim = nextInClaim(c, inClaim, entry.DeviceConfiguration)
			at = fmt.Sprintf("config[%d]", inClaim)
		}
		if entry.Opaque == nil || entry.Opaque.Driver != claim.Driver {
			continue
		}
		e := configEntry{api: entry, path: at + ".opaque.parameters"}
		if at == "" {
			return nil, fmt.Errorf("status.allocation.devices.config[%d].source: %q: want FromClass or FromClaim", i, entry.Source)
		}
		if e.Entry, err = vfconfig.Decode(entry.Opaque.Parameters.Raw, e.path); err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
	slices.SortStableFunc(entries, func(a, b configEntry) int { return strings.Compare(string(b.api.Source), string(a.api.Source)) })
	return entries, nil
}

// nextInClaim returns the index in the claim's specification of the allocation's entry after `last`. The allocation lacks entries for
// alternatives that the scheduler did not choose.
func nextInClaim(c *resourceapi.ResourceClaim, last int, entry resourceapi.DeviceConfiguration) int {
	for i := last + 1; i < len(c.Spec.Devices.Config); i++ {
		if reflect.DeepEqual(c.Spec.Devices.Config[i].DeviceConfiguration, entry) {
			return i
		}
	}
	return last + 1
}

// pathInClass returns the class of an allocation's entry and the entry's path in it. The entries of a class follow one another.
// Kubernetes before 1.35 does not show to which of several classes an entry belongs.
func pathInClass(c *resourceapi.ResourceClaim, i int) string {
	entries := c.Status.Allocation.Devices.Config
	var classes []string
	if len(entries[i].Requests) > 0 {
		classes = []string{classOf(c, entries[i].Requests[0])}
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if name := classOf(c, r.Request); len(entries[i].Requests) == 0 && !slices.Contains(classes, name) {
			classes = append(classes, name)
		}
	}
	if len(classes) != 1 {
		return fmt.Sprintf("class %s: status.allocation.devices.config[%d]", strings.Join(classes, " or "), i)
	}
	index := 0
	for _, before := range entries[:i] {
		if before.Source == resourceapi.AllocationConfigSourceClass && slices.Equal(before.Requests, entries[i].Requests) {
			index++
		}
	}
	return fmt.Sprintf("class %s: config[%d]", classes[0], index)
}

// appliesTo reports whether a config entry applies to an allocation result with a device of the resource: it lists the request, the
// parent of the subrequest, or no request at all.
func (e configEntry) appliesTo(result resourceapi.DeviceRequestAllocationResult, resource string) bool {
	return (e.Resource == "" || e.Resource == resource) &&
		len(resourceclaim.ConfigForResult([]resourceapi.DeviceAllocationConfiguration{e.api}, result)) > 0
}

// configFor returns the merged configuration for the device of an allocation result, or nil if no config entry applies. The claim,
// which may contain only what the resource's configuration allows, overrides the class.
func configFor(entries []configEntry, result resourceapi.DeviceRequestAllocationResult, of Target) (*vfconfig.Config, error) {
	var merged *vfconfig.Config
	resource := of.Resource
	for _, e := range entries {
		if !e.appliesTo(result, resource.FullName()) {
			continue
		}
		if e.ofClaim() {
			if err := resource.ClaimMay.Check(&e.Config); err != nil {
				return nil, fmt.Errorf("%s.%w of resource %s", e.path, err, resource.FullName())
			}
			e.Claimed = e.Set()
		}
		merged = vfconfig.Merge(merged, &e.Config)
	}
	if err := merged.Validate(); err != nil {
		return nil, fmt.Errorf("the merged settings of class and claim: %w", err)
	}
	if merged.IsZero() || isAdmin(result) {
		return nil, nil
	}
	return merged, of.check(entries, merged)
}

// Target is a device of a claim, as far as its settings depend on it.
type Target struct {
	Resource *pool.Resource
	Kind     string // its attribute
	Driver   string // before the claim changes it
}

// Lacks returns the key of the first setting that the device cannot have, because only the PF of a VF sets it, or "".
func (t Target) Lacks(c *vfconfig.Config) (key string) {
	if c == nil || t.Kind != kindPF && t.Kind != kindNoPF {
		return ""
	}
	return c.NeedsPF(pci.IsUserspace(cmp.Or(c.Driver, t.Driver)))
}

// check returns an error for a setting that the device cannot have.
func (t Target) check(entries []configEntry, c *vfconfig.Config) error {
	key := t.Lacks(c)
	if key == "" {
		return nil
	}
	path := "the merged settings of class and claim: "
	for _, e := range entries {
		if e.Text(key) == c.Text(key) {
			path = e.path + "."
		}
	}
	why := map[string]string{kindNoPF: "has no PF on its node, which alone can set it: set it on the hypervisor",
		kindPF: `is a PF, and only VFs have this setting: select kind == "vf"`}[t.Kind]
	return fmt.Errorf("%s%s: %s: the allocated function of %s %s", path, key, c.Text(key), t.Resource.FullName(), why)
}

// isAdmin reports whether an allocation result grants only administrative access, which changes neither the device's owner nor its
// settings.
func isAdmin(r resourceapi.DeviceRequestAllocationResult) bool {
	return r.AdminAccess != nil && *r.AdminAccess
}

// isSingle reports whether only one device can have the setting with the given key, such as a MAC address.
func isSingle(c *vfconfig.Config, key string) bool {
	return key == "mac" || key == "ips" || key == "ifName" && !strings.Contains(c.IfName, vfconfig.IndexMark)
}

// checkSingle returns an error if an entry applies to several devices but has a setting that only one can have, unless a later entry
// overrides it.
func checkSingle(c *resourceapi.ResourceClaim, devices []poddevices.Device, entries []configEntry) error {
	for _, key := range vfconfig.Keys() {
		counts := make([]int, len(entries))
		for _, d := range devices {
			result := c.Status.Allocation.Devices.Results[d.Claim.Result]
			for i, e := range slices.Backward(entries) {
				if isAdmin(result) || !e.Has(key) || !e.appliesTo(result, d.Resource) {
					continue
				}
				if counts[i]++; counts[i] > 1 && isSingle(&e.Config, key) {
					return fmt.Errorf("%s.%s: %s: only one device can have it, but the entry applies to several devices", e.path, key, e.Text(key))
				}
				break
			}
		}
	}
	return nil
}

// checkConfig returns an error if a config entry of the claim applies to no device, or only to those with admin access, or if an
// entry's class is unknown. For a class entry that applies to no device, it returns a warning.
func checkConfig(c *resourceapi.ResourceClaim, entries []configEntry, devices []poddevices.Device) (warnings []string, err error) {
	for _, e := range entries {
		used, set := false, false // by a device, and by a device that gets the settings
		for _, d := range devices {
			result := c.Status.Allocation.Devices.Results[d.Claim.Result]
			applies := e.appliesTo(result, d.Resource)
			used, set = used || applies, set || applies && !isAdmin(result)
		}
		switch unused := e.path + " applies to no device of the claim" + e.scopeText(); {
		case !e.ofClaim() && !used:
			warnings = append(warnings, unused)
		case !e.ofClaim() || set || e.forAlternative(c):
		case !used:
			return warnings, errors.New(unused)
		default:
			return warnings, fmt.Errorf("%s applies only to devices with adminAccess, which get no settings%s", e.path, e.scopeText())
		}
	}
	if err := checkSingle(c, devices, entries); err != nil {
		return warnings, err
	}
	return warnings, checkClasses(c, entries)
}

// forAlternative reports whether an entry may be meant for an alternative that the scheduler did not choose, because it has a resource
// and the request several alternatives.
func (e configEntry) forAlternative(c *resourceapi.ResourceClaim) bool {
	return e.Resource != "" && slices.ContainsFunc(c.Spec.Devices.Requests, func(r resourceapi.DeviceRequest) bool {
		return len(r.FirstAvailable) > 1 && (len(e.api.Requests) == 0 || slices.Contains(e.api.Requests, r.Name))
	})
}

// scopeText returns the requests and the resource of a config entry, in parentheses, for messages.
func (e configEntry) scopeText() string {
	var of []string
	if len(e.api.Requests) > 0 {
		of = append(of, "requests "+strings.Join(e.api.Requests, ", "))
	}
	if e.Resource != "" {
		of = append(of, "resource "+e.Resource)
	}
	if len(of) == 0 {
		return ""
	}
	return " (" + strings.Join(of, ", ") + ")"
}

// checkClasses returns an error if it cannot tell which class an entry comes from. Before Kubernetes 1.35, class entries have no requests,
// so they may come from any class of the claim. Since then, an entry without requests applies to all.
func checkClasses(c *resourceapi.ResourceClaim, entries []configEntry) error {
	var classes []string
	for _, r := range c.Status.Allocation.Devices.Results {
		if name := classOf(c, r.Request); r.Driver == claim.Driver && !slices.Contains(classes, name) {
			classes = append(classes, name)
		}
	}
	ofClass := slices.DeleteFunc(slices.Clone(entries), func(e configEntry) bool {
		return e.ofClaim() || len(e.api.Requests) > 0 || e.Resource != ""
	})
	if len(classes) < 2 || len(ofClass) == 0 {
		return nil
	}
	same := len(ofClass) == len(classes) && !slices.ContainsFunc(ofClass, func(e configEntry) bool {
		return e.String() != ofClass[0].String()
	})
	if same {
		return nil
	}
	return fmt.Errorf("%s: before Kubernetes 1.35 an entry does not show which of the classes %s it belongs to: name the resource in the parameters of "+
		"the classes, as 'podlace sriov classes' does", ofClass[0].path, strings.Join(classes, ", "))
}

// classOf returns the name of the DeviceClass of the request `name`, which is "request" or "request/subrequest".
func classOf(c *resourceapi.ResourceClaim, name string) string {
	request, sub, _ := strings.Cut(name, "/")
	for _, r := range c.Spec.Devices.Requests {
		if r.Name != request {
			continue
		}
		if r.Exactly != nil {
			return r.Exactly.DeviceClassName
		}
		for _, s := range r.FirstAvailable {
			if s.Name == sub {
				return s.DeviceClassName
			}
		}
	}
	return ""
}
