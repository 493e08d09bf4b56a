// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pool"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// entries() returns the config entries of a generated DeviceClass.
func (c resourceClass) entries() []configEntry {
	if c.settings.IsZero() {
		return nil
	}
	text, err := vfconfig.Parameters(c.resource, *c.settings)
	if err != nil {
		return nil
	}
	return []configEntry{{Opaque: &opaque{Driver: claim.Driver, Parameters: text}}}
}

// The type claimEntry is a config entry of a claim. A claimEntry contains settings for this driver.
type claimEntry struct {
	vfconfig.Entry
	path     string
	requests []string
	used     bool
}

// appliesTo reports whether the config entry applies to a request. As in the scheduler, an entry without a list of requests applies to all
// requests, and the name "vf" also matches the subrequest "vf/fast".
func (e claimEntry) appliesTo(request string) bool {
	parent, _, _ := strings.Cut(request, "/")
	return len(e.requests) == 0 || slices.Contains(e.requests, request) || slices.Contains(e.requests, parent)
}

// namedRequest is a request or a subrequest, with the name by which the claim's allocation refers to it.
type namedRequest struct {
	subRequest
	path string
}

// flatten() returns the requests of a claim as a flat list. A request with alternatives is replaced by its alternatives.
func (s claimSpec) flatten(path string) (out []namedRequest) {
	for i, r := range s.Devices.Requests {
		at := fmt.Sprintf("%s.requests[%d]", path, i)
		if r.Exactly != nil {
			sub := *r.Exactly
			sub.Name = r.Name
			out = append(out, namedRequest{sub, at + ".exactly"})
		}
		for k, sub := range r.FirstAvailable {
			sub.Name = r.Name + "/" + sub.Name
			out = append(out, namedRequest{sub, fmt.Sprintf("%s.firstAvailable[%d]", at, k)})
		}
	}
	return out
}

// checkSpec checks the specification of a claim. The argument path is the path of the fields from the object's root to the specification.
func (c *checker) checkSpec(object, path string, spec claimSpec) {
	requests := spec.flatten(path)
	if len(requests) == 0 {
		c.fail("%s: %s.requests: no request has exactly or firstAvailable", object, path)
		return
	}
	entries := c.claimEntries(object, path, spec, requests)
	own := false
	for _, r := range requests {
		class, err := c.classNamed(r.Class)
		if err != nil {
			c.fail("%s: %s.deviceClassName: %v", object, r.path, err)
			own = true
			continue
		}
		if !class.mayMatchDriver() {
			continue
		}
		own = true
		c.checkSelectors(object+": "+r.path, r.Selectors, class.onlyDriver())
		for _, resource := range c.candidates(object, class, r) {
			c.checkRequest(object, class, r, resource, entries)
		}
	}
	for _, e := range entries {
		if own && !e.used {
			c.fail("%s: %s: it applies to no request with VFs", object, e.path)
		}
	}
}

// claimEntries decodes the config entries of a claim for this driver. claimEntries skips entries for other drivers.
func (c *checker) claimEntries(object, path string, spec claimSpec, requests []namedRequest) (entries []*claimEntry) {
	for i, e := range spec.Devices.Config {
		at := fmt.Sprintf("%s.config[%d]", path, i)
		for k, name := range e.Requests {
			if !slices.ContainsFunc(requests, func(r namedRequest) bool { return (claimEntry{requests: []string{name}}).appliesTo(r.Name) }) {
				c.fail("%s: %s.requests[%d]: no request %q", object, at, k, name)
			}
		}
		if e.Opaque == nil || e.Opaque.Driver != claim.Driver {
			continue
		}
		at += ".opaque.parameters"
		entry, err := vfconfig.Decode(e.Opaque.Parameters, at)
		if err != nil {
			c.fail("%s: %v", object, err)
			continue
		}
		entries = append(entries, &claimEntry{Entry: entry, path: at, requests: e.Requests})
	}
	return entries
}

var selectsResource = regexp.MustCompile(`device\.attributes\["` + regexp.QuoteMeta(claim.Driver) +
	`"\](?:\.resource|\["resource"\])\s*==\s*"([^"]+)"`)

// mayMatchDriver reports whether a class may select devices of this driver.
func (d deviceClass) mayMatchDriver() bool {
	return slices.ContainsFunc(d.Selectors, func(s celSelector) bool { return strings.Contains(s.CEL.Expression, claim.Driver) }) ||
		slices.ContainsFunc(d.Config, func(e configEntry) bool { return e.Opaque != nil && e.Opaque.Driver == claim.Driver })
}

// onlyDriver reports whether all devices that a class selects belong to this driver.
func (d deviceClass) onlyDriver() bool {
	return slices.ContainsFunc(d.Selectors, func(s celSelector) bool {
		return celDriver.MatchString(s.CEL.Expression) && strings.Contains(s.CEL.Expression, claim.Driver)
	})
}

// candidates() returns the resources from which a request may get VFs: the resources that occur in the CEL expressions. If the CEL
// expressions contain no resource, candidates() returns all resources of the configuration.
func (c *checker) candidates(object string, class deviceClass, r namedRequest) (names []string) {
	for _, s := range slices.Concat(class.Selectors, r.Selectors) {
		for _, m := range selectsResource.FindAllStringSubmatch(s.CEL.Expression, -1) {
			if c.resources[m[1]] == nil {
				c.fail(`%s: %s: resource %s is not in the configuration, or has no "api": "dra"`, object, r.path, m[1])
			} else if !slices.Contains(names, m[1]) {
				names = append(names, m[1])
			}
		}
	}
	if len(names) == 0 && !slices.ContainsFunc(slices.Concat(class.Selectors, r.Selectors), func(s celSelector) bool {
		return selectsResource.MatchString(s.CEL.Expression)
	}) {
		return slices.Sorted(maps.Keys(c.resources))
	}
	return names
}

// checkRequest computes which VFs and settings a request would get from a resource, and adds the result to c.checked.
func (c *checker) checkRequest(object string, class deviceClass, r namedRequest, resource string, entries []*claimEntry) {
	out := checkedRequest{Object: object, Request: r.Name, Class: class.name, Resource: resource, Devices: r.devices()}
	settings, err := c.settings(class, r, c.resources[resource], entries, &out)
	switch {
	case err != nil:
		c.fail("%s: %v", object, err)
		return
	case r.AdminAccess:
		out.Settings = nil // admin access does not change the VF
	case r.several() && uniqueSetting(settings) != "":
		c.fail("%s: %s: only one VF can have %s, but the request is for %s", object, r.path, uniqueSetting(settings), r.devices())
		return
	}
	c.checked = append(c.checked, out)
}

// uniqueSetting returns a setting that at most one VF of a pod can have, such as a MAC address. uniqueSetting returns "" if the
// configuration contains no such setting.
func uniqueSetting(c *vfconfig.Config) string {
	for _, key := range c.Set() {
		if key == "mac" || key == "ips" || key == "ifName" && !strings.Contains(c.IfName, vfconfig.IndexMark) {
			return key + " " + c.Text(key)
		}
	}
	return ""
}

// settings() merges the config entries of the class and the claim in the same way as the driver's function Prepare.
func (c *checker) settings(class deviceClass, r namedRequest, res *pool.Resource, entries []*claimEntry, out *checkedRequest) (
	merged *vfconfig.Config, err error) {
	add := func(e vfconfig.Entry, from string) {
		merged = vfconfig.Merge(merged, &e.Config)
		for _, key := range e.Set() {
			out.Settings = slices.DeleteFunc(out.Settings, func(s setting) bool { return s.Key == key })
			out.Settings = append(out.Settings, setting{key, merged.Text(key), from})
		}
	}
	for i, e := range class.Config {
		if e.Opaque == nil || e.Opaque.Driver != claim.Driver {
			continue
		}
		entry, err := vfconfig.Decode(e.Opaque.Parameters, fmt.Sprintf("%s: config[%d].opaque.parameters", class.from, i))
		if err != nil {
			return nil, err
		}
		if entry.Resource == "" || entry.Resource == res.FullName() {
			add(entry, "class")
		}
	}
	for _, e := range entries {
		if !e.appliesTo(r.Name) || e.Resource != "" && e.Resource != res.FullName() {
			continue
		}
		e.used = true
		if err := res.ClaimMay.Check(&e.Config); err != nil {
			return nil, fmt.Errorf("%s.%w of resource %s", e.path, err, res.FullName())
		}
		add(e.Entry, "claim")
	}
	if err := merged.Validate(); err != nil {
		return nil, fmt.Errorf("%s: the merged settings of class and claim: %w", r.path, err)
	}
	return merged, nil
}

// devices() describes in words how many VFs a request gets.
func (r subRequest) devices() string {
	text := "1 VF"
	switch {
	case r.Mode == "All":
		text = "all VFs"
	case r.Count > 1:
		text = strconv.Itoa(r.Count) + " VFs"
	}
	if r.AdminAccess {
		text += " (admin access)"
	}
	return text
}

func (r subRequest) several() bool { return r.Mode == "All" || r.Count > 1 }

// atoi() parses the requested number of devices of an extended resource. For a text that the API server would refuse, atoi() returns 1.
func atoi(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 1
	}
	return n
}
