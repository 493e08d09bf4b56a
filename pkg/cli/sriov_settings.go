// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// The type claimEntry is a config entry of a claim. A claimEntry contains settings for this driver.
type claimEntry struct {
	vfconfig.Entry
	path     string
	requests []string
	used     bool // by a request whose VFs get settings
	admin    bool // applies to a request with adminAccess
}

// appliesTo reports whether the config entry applies to a request. As in the scheduler, an entry without a list of requests applies to all
// requests, and the name "vf" also matches the subrequest "vf/fast".
func (e claimEntry) appliesTo(request string) bool {
	parent, _, _ := strings.Cut(request, "/")
	return len(e.requests) == 0 || slices.Contains(e.requests, request) || slices.Contains(e.requests, parent)
}

// namedRequest is a request or a subrequest, with the name by which the claim's allocation refers to it.
type namedRequest struct {
	deviceRequest
	name, path string
	admin      bool
}

// alternatives returns the request, or its subrequests. The argument is the path of the request.
func (r claimRequest) alternatives(at string) (all []namedRequest) {
	if r.Exactly != nil {
		all = append(all, namedRequest{r.Exactly.deviceRequest, r.Name, at + ".exactly", r.Exactly.AdminAccess})
	}
	for i, sub := range r.FirstAvailable {
		all = append(all, namedRequest{sub.deviceRequest, r.Name + "/" + sub.Name, fmt.Sprintf("%s.firstAvailable[%d]", at, i), false})
	}
	return all
}

// checkSpec checks the specification of a claim. The argument path is the path of the fields from the object's root to the specification.
func (c *checker) checkSpec(m manifest, path string, spec claimSpec) {
	c.checkRequests(m, path, spec)
	c.checkDevices(m, path, spec)
}

// checkDevices checks which devices and settings a claim would get.
func (c *checker) checkDevices(m manifest, path string, spec claimSpec) {
	c.read++
	var requests []namedRequest
	for i, r := range spec.Devices.Requests {
		requests = append(requests, r.alternatives(fmt.Sprintf("%s.requests[%d]", path, i))...)
	}
	if len(requests) == 0 {
		c.fail("%s: no request has exactly or firstAvailable", m.at(path+".requests"))
		return
	}
	entries := c.ownEntries(m, path, spec.Devices.Config)
	for i, e := range spec.Devices.Config {
		c.checkRequestNames(m, fmt.Sprintf("%s.config[%d]", path, i), e.Requests, requests)
	}
	c.checkConstraints(m, path, spec, requests)
	first, own := len(c.checked), false
	var unknown []namedRequest
	for _, r := range requests {
		class, ok := c.class(func(d deviceClass) bool { return d.name == r.Class })
		switch {
		case !ok:
			unknown = append(unknown, r)
		case class.mayMatchDriver(r) || slices.ContainsFunc(entries, func(e *claimEntry) bool { return e.appliesTo(r.name) }):
			own = true
			c.checkSelectors(m, r.path, r.Selectors, class.onlyDriver())
			for _, resource := range c.candidates(m, class, r) {
				c.checkRequest(m, class, r, resource, entries)
			}
		}
	}
	c.checkRepeats(m, path, c.checked[first:])
	for _, r := range unknown {
		settings := slices.ContainsFunc(entries, func(e *claimEntry) bool { return !e.used && e.appliesTo(r.name) })
		c.unknownClass(m.at(r.path+".deviceClassName"), r.Class, settings)
	}
	for _, e := range entries {
		switch maybe := slices.ContainsFunc(unknown, func(r namedRequest) bool { return e.appliesTo(r.name) }); {
		case e.used || maybe:
		case e.admin:
			c.fail("%s: it applies only to requests with adminAccess, which do not change the settings of a VF", m.at(e.path))
		case own:
			c.fail("%s: it applies to no request with VFs", m.at(e.path))
		}
	}
}

// ownEntries decodes those config entries of a claim or class that belong to this driver.
func (c *checker) ownEntries(m manifest, path string, config []configEntry) (entries []*claimEntry) {
	for i, e := range config {
		at := fmt.Sprintf("%s.config[%d].opaque", path, i)
		switch {
		case e.Opaque == nil:
			c.fail("%s is missing", m.at(at))
		case e.Opaque.Driver == claim.Driver:
			at += ".parameters"
			entry, err := vfconfig.Decode(e.Opaque.Parameters, at)
			var problems strict.Problems
			errors.As(err, &problems)
			for _, p := range problems {
				c.fail("%s: %s", m.at(p.Key), p.Text)
			}
			entries = append(entries, &claimEntry{Entry: entry, path: at, requests: e.Requests})
		case isMisspeltDriver(e.Opaque.Driver) || bytes.Contains(e.Opaque.Parameters, []byte(vfconfig.APIVersion)):
			c.fail("%s: %q: did you mean %s?", m.at(at+".driver"), e.Opaque.Driver, claim.Driver)
		}
	}
	return entries
}

var selectsResource = regexp.MustCompile(`device\.attributes\["` + regexp.QuoteMeta(claim.Driver) +
	`"\](?:\.resource|\["resource"\])\s*==\s*"([^"]+)"`)

// mentionsDriver reports whether one of the expressions contains the name of this driver.
func mentionsDriver(list []celSelector) bool {
	return slices.ContainsFunc(list, func(s celSelector) bool { return strings.Contains(s.CEL.Expression, claim.Driver) })
}

// mayMatchDriver reports whether a request of the class may select devices of this driver.
func (d deviceClass) mayMatchDriver(r namedRequest) bool {
	return mentionsDriver(d.Selectors) || mentionsDriver(r.Selectors) ||
		slices.ContainsFunc(d.Config, func(e classConfig) bool { return e.Opaque != nil && e.Opaque.Driver == claim.Driver })
}

// onlyDriver reports whether all devices that a class selects belong to this driver.
func (d deviceClass) onlyDriver() bool {
	return slices.ContainsFunc(d.Selectors, func(s celSelector) bool {
		return celDriver.MatchString(s.CEL.Expression) && mentionsDriver([]celSelector{s})
	})
}

// candidates() returns the resources from which a request may get VFs: the resources that occur in the CEL expressions. If the CEL
// expressions contain no resource, candidates() returns all resources of the configuration.
func (c *checker) candidates(m manifest, class deviceClass, r namedRequest) (names []string) {
	selects := false
	for _, s := range slices.Concat(class.Selectors, r.Selectors) {
		for _, found := range selectsResource.FindAllStringSubmatch(s.CEL.Expression, -1) {
			selects = true
			if c.resources[found[1]] == nil {
				c.fail(`%s: resource %s is not in the configuration, or has no "api": "dra"`, m.at(r.path), found[1])
			} else if !slices.Contains(names, found[1]) {
				names = append(names, found[1])
			}
		}
	}
	if !selects {
		return slices.Sorted(maps.Keys(c.resources))
	}
	return names
}

// checkRequest computes which VFs and settings a request would get from a resource, and adds the result to c.checked.
func (c *checker) checkRequest(m manifest, class deviceClass, r namedRequest, resource string, entries []*claimEntry) {
	out := checkedRequest{Object: m.String(), Request: r.name, Class: class.name, Resource: resource, Devices: r.devices()}
	before := len(c.problems)
	settings := c.settings(m, class, r, c.resources[resource], entries, &out)
	if r.admin {
		out.Settings = nil // admin access does not change the VF
	} else if i := slices.IndexFunc(out.Settings, isUnique); i >= 0 && (r.Mode == "All" || r.Count > 1) {
		c.fail("%s: only one VF can have %s %s, but the request is for %s", m.at(r.path), out.Settings[i].Key, out.Settings[i].Value, r.devices())
	}
	if len(c.problems) > before {
		return
	}
	if err := settings.Complete(func(key string) string { return key }); err != nil && !r.admin {
		c.notice("%s: the settings of class and claim: %v; ADD fails unless the conflist sets vlan", m.at(r.path), err)
	}
	c.checked = append(c.checked, out)
}

// settings() merges the config entries of the class and the claim in the same way as the driver's function Prepare.
func (c *checker) settings(m manifest, class deviceClass, r namedRequest, res *pool.Resource, entries []*claimEntry, out *checkedRequest) (
	merged *vfconfig.Config) {
	add := func(e vfconfig.Entry, from string) {
		merged = vfconfig.Merge(merged, &e.Config)
		for _, key := range e.Set() {
			out.Settings = slices.DeleteFunc(out.Settings, func(s setting) bool { return s.Key == key })
			out.Settings = append(out.Settings, setting{key, merged.Text(key), from})
		}
	}
	for _, e := range class.entries {
		if e.Resource == "" || e.Resource == res.FullName() {
			add(e.Entry, "class")
		}
	}
	for _, e := range entries {
		if !e.appliesTo(r.name) || e.Resource != "" && e.Resource != res.FullName() {
			continue
		}
		e.used, e.admin = e.used || !r.admin, e.admin || r.admin
		if err := res.ClaimMay.Check(&e.Config); err != nil {
			c.fail("%s: %v of resource %s", m.at(e.path), err, res.FullName())
		}
		add(e.Entry, "claim")
	}
	if err := merged.Validate(); err != nil {
		c.fail("%s: the merged settings of class and claim: %v", m.at(r.path), err)
	}
	return merged
}

// devices() describes in words how many VFs a request gets.
func (r namedRequest) devices() string {
	text := "1 VF"
	switch {
	case r.Mode == "All":
		text = "all VFs"
	case r.Count > 1:
		text = strconv.Itoa(r.Count) + " VFs"
	}
	if r.admin {
		text += " (admin access)"
	}
	return text
}
