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
	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// checkNames reports claims, templates and classes with the name of another, which the API server would take for a change of it.
func (c *checker) checkNames(list []manifest) {
	named := map[[3]string]bool{}
	for _, m := range list {
		id := [3]string{m.kind(), m.namespace(), m.name()}
		if named[id] {
			c.fail("%s: another %s has this name", m.at("metadata.name"), m.kind())
		}
		named[id] = m.name() != "" && m.root.Get("apiVersion").Text() == claimAPI
	}
}

// checkObject checks one Kubernetes object in the file.
func (c *checker) checkObject(m manifest) {
	switch m.kind() {
	case kindClaim:
		var spec claimSpec
		if c.decodeSpec(m, &spec) {
			c.checkSpec(m, "spec.devices", spec)
		}
	case kindTemplate:
		var spec templateSpec
		if c.decodeSpec(m, &spec) {
			c.checkSpec(m, "spec.spec.devices", spec.Spec)
		}
	case kindClass: // addClass has checked it
		c.read++
	default:
		template, ok := validate.PodTemplates()[m.kind()]
		spec := m.root.Get(template...).Get("spec")
		near := strict.Nearest(m.kind(), []string{kindClaim, kindTemplate, kindClass})
		switch {
		case near != "" && m.root.Get("apiVersion").Text() == claimAPI:
			c.fail("%s: %q: did you mean %s?", m.at("kind"), m.kind(), near)
		case ok && spec.Data != nil:
			c.checkPod(m, strings.Join(append(slices.Clone(template), "spec"), "."), spec)
		case m.kind() == kindPod: // another kind may belong to another API group
			c.fail("%s is missing", m.at("spec"))
		}
	}
}

// checkPod checks that the files contain all claims in the pod's specification, and that no two claims set the same MAC address, interface
// name or IP addresses. checkPod also checks the extended resources of the pod. The argument path is the path of the pod's specification.
func (c *checker) checkPod(m manifest, path string, value strict.Value) {
	var spec podSpec
	c.decode(m, value, &spec, false)
	requests := make([][]checkedRequest, len(spec.Claims))
	for i, pc := range spec.Claims {
		kind, name := kindClaim, pc.Claim
		if pc.Template != "" {
			kind, name = kindTemplate, pc.Template
		}
		place := m.at(fmt.Sprintf("%s.resourceClaims[%d]", path, i))
		at := slices.IndexFunc(c.objects, func(o manifest) bool {
			return o.kind() == kind && o.name() == name && o.namespace() == m.namespace()
		})
		switch {
		case (pc.Claim == "") == (pc.Template == ""):
			c.fail("%s: want resourceClaimName or resourceClaimTemplateName", place)
			continue
		case at < 0:
			c.fail("%s: %s %s is in none of the files and was not checked", place, kind, name)
			continue
		}
		c.read++
		same := func(o podClaim) bool { return o.Claim != "" && o.Claim == pc.Claim }
		if slices.ContainsFunc(spec.Claims[:i], same) {
			continue
		}
		alone := &checker{resources: c.resources, classes: c.classes}
		alone.checkObject(c.objects[at])
		requests[i] = alone.checked
		for k := range i {
			if text := sharedSetting(requests[i], requests[k]); text != "" {
				c.fail("%s: claim %s: %s: %s of the pod sets the same value, and only one VF of a pod can have it", place, pc.Name, text,
					spec.Claims[k].Name)
			}
		}
	}
	for i, container := range spec.InitContainers {
		c.checkContainer(m, fmt.Sprintf("%s.initContainers[%d]", path, i), container, spec.Claims)
	}
	for i, container := range spec.Containers {
		c.checkContainer(m, fmt.Sprintf("%s.containers[%d]", path, i), container, spec.Claims)
	}
}

// checkContainer checks the claims that a container uses, and its limits for extended resources of a class.
func (c *checker) checkContainer(m manifest, path string, container podContainer, claims []podClaim) {
	for i, used := range container.Resources.Claims {
		if !slices.ContainsFunc(claims, func(pc podClaim) bool { return pc.Name == used.Name }) {
			c.fail("%s: the pod has no claim %q", m.at(fmt.Sprintf("%s.resources.claims[%d].name", path, i)), used.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(container.Resources.Limits)) {
		if class, ok := c.class(func(d deviceClass) bool { return d.ExtendedResourceName == name }); ok {
			var spec claimSpec
			n, _ := strconv.Atoi(strings.Trim(string(container.Resources.Limits[name]), `"`)) // 0 of a text that the API server refuses stands for one device
			request := exactRequest{deviceRequest: deviceRequest{Class: class.name, Count: n}}
			spec.Devices.Requests = []claimRequest{{Name: name, Exactly: &request}}
			c.checkDevices(manifest{m.root, ", container " + container.Name}, "resources.limits", spec)
		}
	}
}

// sharedSetting returns a setting that requests of both lists have, although only one VF of a pod can have it. sharedSetting returns "" if
// there is no such setting.
func sharedSetting(list, others []checkedRequest) string {
	for _, r := range list {
		for _, s := range r.Settings {
			same := func(o setting) bool {
				return o.Key == s.Key && (o.Value == s.Value || s.Key == "mac" && strings.EqualFold(o.Value, s.Value))
			}
			if isUnique(s) && slices.ContainsFunc(others, func(o checkedRequest) bool { return slices.ContainsFunc(o.Settings, same) }) {
				return s.Key + " " + s.Value
			}
		}
	}
	return ""
}

// isUnique reports whether only one VF of a pod can have a setting.
func isUnique(s setting) bool {
	return s.Key == "mac" || s.Key == "ips" || s.Key == "ifName" && !strings.Contains(s.Value, vfconfig.IndexMark)
}

// checkRepeats reports a setting that two requests of a claim have, although only one VF of a pod can have it. Alternatives of one request
// may have the same setting.
func (c *checker) checkRepeats(m manifest, path string, list []checkedRequest) {
	for i, r := range list {
		parent, _, _ := strings.Cut(r.Request, "/")
		for _, other := range list[:i] {
			if first, _, _ := strings.Cut(other.Request, "/"); first == parent {
				continue
			}
			if text := sharedSetting([]checkedRequest{r}, []checkedRequest{other}); text != "" {
				c.fail("%s: only one VF can have %s, but the requests %s and %s set it", m.at(path), text, other.Request, r.Request)
			}
		}
	}
}

// maxDevices is the maximum number of devices in an allocation (limit of Kubernetes).
const maxDevices = 32

// checkRequests reports what the API server refuses, and a claim for which every allocation would have too many devices.
func (c *checker) checkRequests(m manifest, path string, spec claimSpec) {
	total := 0
	names := map[string]bool{}
	checkName := func(path, name string) {
		switch label := name[strings.LastIndex(name, "/")+1:]; {
		case !dnsLabel.MatchString(label):
			c.fail("%s: %q: want a name of at most 63 lower-case letters, digits and -", m.at(path+".name"), label)
		case names[name]:
			c.fail("%s: %s: another request has this name", m.at(path+".name"), label)
		}
		names[name] = true
	}
	for i, r := range spec.Devices.Requests {
		at := fmt.Sprintf("%s.requests[%d]", path, i)
		checkName(at, r.Name)
		var counts []int
		for _, one := range r.alternatives(at) {
			if one.name != r.Name {
				checkName(one.path, one.name)
			}
			if _, err := strict.OneOf("", "ExactCount", "All")(one.Mode); err != nil {
				c.fail("%s: %q: want ExactCount or All", m.at(one.path+".allocationMode"), one.Mode)
			}
			if one.Count < 0 || one.Count > 0 && one.Mode == "All" {
				c.fail("%s: %d: want at least 1, and none with allocationMode All", m.at(one.path+".count"), one.Count)
			}
			counts = append(counts, max(one.Count, 1))
		}
		if (r.Exactly == nil) == (len(r.FirstAvailable) == 0) {
			c.fail("%s: want exactly or firstAvailable", m.at(at))
		} else {
			total += slices.Min(counts)
		}
	}
	if total > maxDevices {
		c.fail("%s: %d devices: Kubernetes allocates at most %d devices for a claim", m.at(path+".requests"), total, maxDevices)
	}
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// checkConstraints checks the names of requests and attributes in the constraints of a claim.
func (c *checker) checkConstraints(m manifest, path string, spec claimSpec, requests []namedRequest) {
	for i, constraint := range spec.Devices.Constraints {
		at := fmt.Sprintf("%s.constraints[%d]", path, i)
		c.checkRequestNames(m, at, constraint.Requests, requests)
		own := func(r namedRequest) bool {
			class, _ := c.class(func(d deviceClass) bool { return d.name == r.Class })
			return class.onlyDriver() && (claimEntry{requests: constraint.Requests}).appliesTo(r.name)
		}
		for _, key := range [][2]string{{"matchAttribute", constraint.Match}, {"distinctAttribute", constraint.Distinct}} {
			domain, name, full := strings.Cut(key[1], "/")
			derived := slices.ContainsFunc(requests, func(r namedRequest) bool {
				return slices.ContainsFunc(r.Derived, func(d derivedAttribute) bool { return d.Name == key[1] })
			})
			switch {
			case key[1] == "" || derived:
			case !full:
				c.fail("%s: %s: want a domain and a name, such as %s/numa", m.at(at+"."+key[0]), key[1], claim.Driver)
			default:
				if text := unknownAttribute(attribute{domain, name}, slices.ContainsFunc(requests, own)); text != "" {
					c.fail("%s: %s: %s", m.at(at+"."+key[0]), key[1], text)
				}
			}
		}
	}
}

// checkRequestNames reports each name in a list of requests that is no request of the claim.
func (c *checker) checkRequestNames(m manifest, path string, names []string, requests []namedRequest) {
	for i, name := range names {
		if !slices.ContainsFunc(requests, func(r namedRequest) bool { return (claimEntry{requests: []string{name}}).appliesTo(r.name) }) {
			c.fail("%s: no request %q", m.at(fmt.Sprintf("%s.requests[%d]", path, i)), name)
		}
	}
}
