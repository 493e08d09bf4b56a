// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/strict"
)

// An option is a request without alternatives, or one of its alternatives, with the name by which an allocation refers to it.
type option struct {
	resourceapi.ExactDeviceRequest
	name, path string
	request    int        // index
	sub        int        // index of the alternative, or -1
	selectors  []selector // of the class and of the request
	matched    []device
	wrong      bool // a selector of the request is wrong, so that only those of the class are used
}

// optionsOf returns the requests of a claim with all their alternatives. It sets what the API server sets in new objects.
func optionsOf(path string, d *resourceapi.DeviceClaim) (all []option) {
	for i := range d.Requests {
		r, at := &d.Requests[i], fmt.Sprintf("%s.requests[%d]", path, i)
		if e := r.Exactly; e != nil {
			setDefaults(&e.AllocationMode, &e.Count)
			all = append(all, option{ExactDeviceRequest: *e, name: r.Name, path: at + ".exactly", request: i, sub: -1})
		}
		for k := range r.FirstAvailable {
			s := &r.FirstAvailable[k]
			setDefaults(&s.AllocationMode, &s.Count)
			exact := resourceapi.ExactDeviceRequest{DeviceClassName: s.DeviceClassName, Selectors: s.Selectors, AllocationMode: s.AllocationMode,
				Count: s.Count, Capacity: s.Capacity, DerivedAttributes: s.DerivedAttributes}
			all = append(all, option{ExactDeviceRequest: exact, name: r.Name + "/" + s.Name, path: fmt.Sprintf("%s.firstAvailable[%d]", at, k),
				request: i, sub: k})
		}
	}
	return all
}

func setDefaults(mode *resourceapi.DeviceAllocationMode, count *int64) {
	*mode = cmp.Or(*mode, resourceapi.DeviceAllocationModeExactCount)
	if *mode == resourceapi.DeviceAllocationModeExactCount {
		*count = cmp.Or(*count, 1)
	}
}

// appliesTo reports whether a list of requests in a constraint or config entry includes the option. As in the scheduler, an empty list
// includes all, and "vf" also stands for the alternative "vf/fast".
func (o option) appliesTo(requests []string) bool {
	return len(requests) == 0 || slices.Contains(requests, o.name) || slices.Contains(requests, o.requestName())
}

func (o option) requestName() string {
	name, _, _ := strings.Cut(o.name, "/")
	return name
}

// resources returns the resources of the matched VFs.
func (o option) resources() (names []string) {
	for _, d := range o.matched {
		if name := d.resource(); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// most returns how many devices within reach of one node match at most.
func (o option) most() int64 {
	of := map[string]int64{}
	for _, d := range o.matched {
		of[d.node]++
	}
	shared := of[""]
	of[""] = 0
	return shared + slices.Max(slices.Collect(maps.Values(of)))
}

// shortage says how many devices a request wants, and how many the best node has.
func (o option) shortage() string {
	return fmt.Sprintf("it wants %s, and at most %d of a node match its class and selectors", o.devices(), o.most())
}

func (o option) isAdmin() bool { return o.AdminAccess != nil && *o.AdminAccess }

// devices describes in words how many VFs an option gets.
func (o option) devices() string {
	what := "VF"
	if len(o.matched) > 0 && o.matched[0].driver != claim.Driver {
		what = "device"
	}
	text := fmt.Sprintf("%d %ss", o.Count, what)
	switch {
	case o.AllocationMode == resourceapi.DeviceAllocationModeAll:
		text = "all " + what + "s"
	case o.Count == 1:
		text = "1 " + what
	}
	if o.isAdmin() {
		text += " (admin access)"
	}
	return text
}

// checkRequests reports requests that the API server refuses.
func (c *checker) checkRequests(m manifest, path string, d resourceapi.DeviceClaim, all []option) (ok bool) {
	before := len(c.problems)
	names := map[string]bool{}
	checkName := func(at, name string) {
		switch label := name[strings.LastIndex(name, "/")+1:]; {
		case len(validation.IsDNS1123Label(label)) > 0:
			c.fail("%s: %q: want a name of at most 63 lower-case letters, digits and -", m.at(at+".name"), label)
		case names[name]:
			c.fail("%s: %s: another request has this name", m.at(at+".name"), label)
		}
		names[name] = true
	}
	for i, r := range d.Requests {
		at := fmt.Sprintf("%s.requests[%d]", path, i)
		if checkName(at, r.Name); (r.Exactly == nil) == (len(r.FirstAvailable) == 0) {
			c.fail("%s: want exactly or firstAvailable", m.at(at))
		}
	}
	for _, o := range all {
		if o.sub >= 0 {
			checkName(o.path, o.name)
		}
		if _, err := strict.OneOf("ExactCount", "All")(string(o.AllocationMode)); err != nil {
			c.fail("%s: %q: want ExactCount or All", m.at(o.path+".allocationMode"), o.AllocationMode)
		}
		all := o.AllocationMode == resourceapi.DeviceAllocationModeAll
		if most := int64(resourceapi.AllocationResultsMaxSize); o.Count < 0 || o.Count > most || o.Count > 0 && all {
			c.fail("%s: %d: want 1-%d, as many devices as a claim can have, and no count with allocationMode All", m.at(o.path+".count"), o.Count, most)
		}
	}
	if len(all) == 0 {
		c.fail("%s: no request has exactly or firstAvailable", m.at(path+".requests"))
	}
	return len(c.problems) == before
}

// checkNames reports each name in a list of requests that is no request of the claim.
func (c *checker) checkNames(m manifest, path string, names []string, all []option) {
	for i, name := range names {
		if !slices.ContainsFunc(all, func(o option) bool { return o.appliesTo([]string{name}) }) {
			c.fail("%s: no request %q", m.at(fmt.Sprintf("%s.requests[%d]", path, i)), name)
		}
	}
}

// checkConstraints checks the names of requests and attributes in the constraints of a claim.
func (c *checker) checkConstraints(m manifest, path string, d resourceapi.DeviceClaim, all, here []option) (ok bool) {
	before := len(c.problems)
	for i, constraint := range d.Constraints {
		at := fmt.Sprintf("%s.constraints[%d]", path, i)
		c.checkNames(m, at, constraint.Requests, all)
		key, name := "matchAttribute", constraint.MatchAttribute
		if name == nil {
			key, name = "distinctAttribute", constraint.DistinctAttribute
		}
		if (constraint.MatchAttribute == nil) == (constraint.DistinctAttribute == nil) { // of two, the scheduler would ignore distinctAttribute
			c.fail("%s: want either matchAttribute or distinctAttribute", m.at(at))
			continue
		}
		if !slices.ContainsFunc(here, func(o option) bool { return o.appliesTo(constraint.Requests) }) {
			continue
		}
		domain, id, full := strings.Cut(string(*name), "/")
		a := attribute{domain, id}
		_, own := c.own[a]
		derived := slices.ContainsFunc(all, func(o option) bool {
			return slices.ContainsFunc(o.DerivedAttributes, func(d resourceapi.DeviceDerivedAttribute) bool { return d.Name == *name })
		})
		switch {
		case !full:
			c.fail("%s: %s: want a domain and a name, such as %s/numa", m.at(at+"."+key), *name, claim.Driver)
		case !own && !derived && len(c.values[a]) == 0:
			c.fail("%s: %s: %s", m.at(at+"."+key), *name, c.unknown(a, attribute.String))
		}
	}
	return len(c.problems) == before
}

// checkDevices checks which devices and settings a claim would get. It goes on without wrong selectors to find all faults.
func (c *checker) checkDevices(m manifest, path string, d resourceapi.DeviceClaim) (rows []served) {
	c.checked++
	all := optionsOf(path, &d)
	c.checkEntries(m, path, d.Config)
	for i, e := range d.Config {
		c.checkNames(m, fmt.Sprintf("%s.config[%d]", path, i), e.Requests, all)
	}
	here := c.selectHere(m, all, d.Config)
	if !c.checkRequests(m, path, d, all) || !c.checkConstraints(m, path, d, all, here) || len(here) == 0 {
		return nil
	}
	for i := range here {
		o := &here[i]
		if !o.wrong {
			o.matched, o.wrong = c.matchRequest(m, o)
		}
		if o.wrong {
			selectors, _, _ := fieldsOf(&d, *o)
			*selectors = nil
			class, _ := c.classNamed(o.DeviceClassName)
			o.matched, _ = c.matching(class.selectors)
		}
		if c.example {
			o.wantExamples(&d)
		}
	}
	rows = c.allocateAll(m, path, c.reduce(m, path, d, all, here), here)
	c.served = append(c.served, rows...)
	return rows
}

// matchRequest returns the devices that class and request select. wrong is true if there are none or a selector is wrong.
func (c *checker) matchRequest(m manifest, o *option) (matched []device, wrong bool) {
	matched, ok := c.matching(o.selectors)
	if ok && c.example {
		matched = c.examplesOf(o.selectors)
	}
	lack := c.lack
	if o.sub >= 0 { // the scheduler may choose another alternative
		lack = c.notice
	}
	switch {
	case !ok:
		return nil, true
	case len(matched) == 0:
		if !c.checkValues(o.selectors, lack) {
			lack("%s: the selectors of class and request match no device", m.at(o.path))
		}
	case !c.example:
		c.checkValues(o.selectors, c.notice)
		if i := slices.IndexFunc(matched, func(d device) bool { return d.selected }); i >= 0 {
			c.notice("%s: the nodes of pool %s are not known (nodeSelector), so the devices of %s were taken to be within reach of each node",
				m.at(o.path), matched[i].pool, matched[i].driver)
		}
	}
	return matched, len(matched) == 0 && o.sub < 0
}

// selectHere compiles the selectors of the requests, and returns the requests that the devices here can serve.
func (c *checker) selectHere(m manifest, all []option, entries []resourceapi.DeviceClaimConfiguration) (here []option) {
	var unknown []option
	for _, o := range all {
		at := m.at(o.path + ".deviceClassName")
		one, known := c.classNamed(o.DeviceClassName)
		own, valid := c.compile(m, o.path, o.Selectors)
		o.selectors = slices.Concat(one.selectors, own)
		other := c.otherDriver(o.selectors)
		switch project := replaced()[other]; {
		case !known:
			unknown = append(unknown, o)
			c.checkReads(slices.DeleteFunc(own, func(s selector) bool {
				return !slices.ContainsFunc(s.reads, func(r read) bool { return replaced()[r.domain] != "" && !c.drivers[r.domain] })
			}))
		case project != "":
			c.fail("%s: class and selectors want devices of %s (%s), which has none here: for VFs of Podlace compare device.driver with %q", at, other,
				project, claim.Driver)
		case other != "":
			c.notice("%s: class and selectors want devices of %s, which has none here, and were not checked", at, other)
		case one.sound: // otherwise the fault was reported with the class
			o.wrong = !c.checkReads(own) || !valid
			if o.isAdmin() {
				c.notice("%s: only a namespace with the label resource.kubernetes.io/admin-access: \"true\" may have such a claim", m.at(o.path+".adminAccess"))
			}
			here = append(here, o)
		}
	}
	for _, o := range unknown {
		settings := slices.ContainsFunc(entries, func(e resourceapi.DeviceClaimConfiguration) bool {
			used := slices.ContainsFunc(here, func(h option) bool { return h.appliesTo(e.Requests) })
			return e.Opaque != nil && e.Opaque.Driver == claim.Driver && !used && o.appliesTo(e.Requests)
		})
		c.unknownClass(m.at(o.path+".deviceClassName"), o.DeviceClassName, settings)
	}
	return here
}

// fieldsOf returns the selectors of an option in a claim, and how many devices it wants.
func fieldsOf(d *resourceapi.DeviceClaim, o option) (*[]resourceapi.DeviceSelector, *resourceapi.DeviceAllocationMode, *int64) {
	r := &d.Requests[o.request]
	if o.sub < 0 {
		return &r.Exactly.Selectors, &r.Exactly.AllocationMode, &r.Exactly.Count
	}
	s := &r.FirstAvailable[o.sub]
	return &s.Selectors, &s.AllocationMode, &s.Count
}

// wantExamples makes an option of a claim want examples of its resources. Whatever else an example has is made up, like their number, so
// that one of them stands for all.
func (o option) wantExamples(d *resourceapi.DeviceClaim) {
	selectors, mode, count := fieldsOf(d, o)
	if *mode == resourceapi.DeviceAllocationModeAll {
		*mode, *count = resourceapi.DeviceAllocationModeExactCount, 1
	}
	names := append([]string{}, o.resources()...) // literal makes null of a nil slice
	expression := fmt.Sprintf("%s in %s", attribute{claim.Driver, "resource"}.expression(), literal(names))
	*selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
}

// reduce returns the claim without the requests for devices that are not here, with the indexes of the others updated. It reports
// config entries for other requests, which the allocator ignores.
func (c *checker) reduce(m manifest, path string, d resourceapi.DeviceClaim, all, here []option) resourceapi.DeviceClaim {
	for i, e := range d.Config {
		applies := func(o option) bool { return o.appliesTo(e.Requests) }
		known := func(o option) bool {
			_, ok := c.classNamed(o.DeviceClassName)
			return ok && applies(o)
		}
		ours := e.Opaque != nil && e.Opaque.Driver == claim.Driver
		if ours && !slices.ContainsFunc(here, applies) && slices.ContainsFunc(all, known) {
			c.fail("%s: it applies to no request with VFs", m.at(fmt.Sprintf("%s.config[%d].opaque.parameters", path, i)))
		}
	}
	out, last := *d.DeepCopy(), -1
	out.Requests = nil
	for i := range here {
		o := &here[i]
		if o.request != last {
			one := *d.Requests[o.request].DeepCopy()
			one.FirstAvailable = nil
			out.Requests, last = append(out.Requests, one), o.request
		}
		r := &out.Requests[len(out.Requests)-1]
		if o.sub >= 0 {
			r.FirstAvailable = append(r.FirstAvailable, d.Requests[last].FirstAvailable[o.sub])
		}
		o.request, o.sub = len(out.Requests)-1, len(r.FirstAvailable)-1
	}
	return out
}

// examplesOf returns the examples of the resources with which selectors compare, or else of all resources.
func (c *checker) examplesOf(list []selector) []device {
	var resources []any
	for _, s := range list {
		for _, r := range s.reads {
			if r.attribute == (attribute{claim.Driver, "resource"}) && r.isEquality() {
				resources = append(resources, r.values...)
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(c.devices), func(d device) bool {
		return len(resources) > 0 && !slices.Contains(resources, any(d.resource()))
	})
}
