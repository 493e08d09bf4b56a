// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// checkObject checks one Kubernetes object in the file.
func (c *checker) checkObject(m manifest) {
	switch m.Kind {
	case kindClaim, kindTemplate:
		var spec struct {
			claimSpec
			Spec claimSpec `json:"spec"` // of a template
		}
		if err := m.decode(&spec); err != nil {
			c.fail("%v", err)
			return
		}
		c.checkKeys(m)
		if m.Kind == kindTemplate {
			c.checkSpec(m.String(), "spec.spec.devices", spec.Spec)
		} else {
			c.checkSpec(m.String(), "spec.devices", spec.claimSpec)
		}
	case kindClass: // addClasses has checked it
		c.read++
	default:
		template, ok := validate.PodTemplates()[m.Kind]
		if !ok {
			return
		}
		spec, err := m.podSpec(template)
		if err != nil {
			c.fail("%v", err)
			return
		}
		c.checkPod(m, strings.Join(append(slices.Clone(template), "spec"), "."), spec)
	}
}

// checkPod checks that the files contain all claims in the pod's specification, and that no two claims set the same MAC address, interface
// name or IP addresses. checkPod also checks the extended resources of the pod. The argument path is the path of the pod's specification.
func (c *checker) checkPod(m manifest, path string, spec podSpec) {
	requests := make([][]checkedRequest, len(spec.Claims))
	for i, pc := range spec.Claims {
		kind, name := kindClaim, pc.Claim
		if pc.Template != "" {
			kind, name = kindTemplate, pc.Template
		}
		at := slices.IndexFunc(c.objects, func(o manifest) bool {
			return o.Kind == kind && o.Metadata.Name == name && o.namespace() == m.namespace()
		})
		if at < 0 {
			c.fail("%s: %s %s is in none of the files and was not checked", m.at(fmt.Sprintf("%s.resourceClaims[%d]", path, i)), kind, name)
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
				c.fail("%s: claim %s: %s: %s of the pod sets the same value, and only one VF of a pod can have it",
					m.at(fmt.Sprintf("%s.resourceClaims[%d]", path, i)), pc.Name, text, spec.Claims[k].Name)
			}
		}
	}
	for _, container := range append(slices.Clone(spec.InitContainers), spec.Containers...) {
		for name, count := range container.Resources.Limits {
			if class, ok := c.class(func(d deviceClass) bool { return d.ExtendedResourceName == name }); ok {
				var spec claimSpec
				n, _ := strconv.Atoi(strings.Trim(string(count), `"`)) // 0 of a text that the API server refuses stands for one device
				request := subRequest{Class: class.name, Count: n}
				spec.Devices.Requests = []claimRequest{{Name: name, Exactly: &request}}
				c.checkSpec(m.String()+", container "+container.Name, "resources.limits", spec)
			}
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
func (c *checker) checkRepeats(object, path string, list []checkedRequest) {
	for i, r := range list {
		parent, _, _ := strings.Cut(r.Request, "/")
		for _, other := range list[:i] {
			if first, _, _ := strings.Cut(other.Request, "/"); first == parent {
				continue
			}
			if text := sharedSetting([]checkedRequest{r}, []checkedRequest{other}); text != "" {
				c.fail("%s: only one VF can have %s, but the requests %s and %s set it", c.at(object, path), text, other.Request, r.Request)
			}
		}
	}
}

// maxDevices is the maximum number of devices in an allocation (limit of Kubernetes).
const maxDevices = 32

// checkCount reports a claim for which every allocation would have too many devices.
func (c *checker) checkCount(object, path string, spec claimSpec) {
	total := 0
	for _, r := range spec.Devices.Requests {
		fewest := 0
		for i, sub := range r.FirstAvailable {
			if n := max(sub.Count, 1); i == 0 || n < fewest {
				fewest = n
			}
		}
		if r.Exactly != nil {
			fewest = max(r.Exactly.Count, 1)
		}
		total += fewest
	}
	if total > maxDevices {
		c.fail("%s: %d devices: Kubernetes allocates at most %d devices for a claim", c.at(object, path+".requests"), total, maxDevices)
	}
}

// checkConstraints checks the names of requests and attributes in the constraints of a claim.
func (c *checker) checkConstraints(object, path string, spec claimSpec, requests []namedRequest) {
	for i, constraint := range spec.Devices.Constraints {
		at := fmt.Sprintf("%s.constraints[%d]", path, i)
		c.checkRequestNames(object, at, constraint.Requests, requests)
		for _, key := range [][2]string{{"matchAttribute", constraint.Match}, {"distinctAttribute", constraint.Distinct}} {
			domain, name, full := strings.Cut(key[1], "/")
			derived := slices.ContainsFunc(requests, func(r namedRequest) bool {
				return slices.ContainsFunc(r.Derived, func(d derivedAttribute) bool { return d.Name == key[1] })
			})
			switch {
			case key[1] == "" || derived:
			case !full:
				c.fail("%s: %s: want a domain and a name, such as %s/numa", c.at(object, at+"."+key[0]), key[1], claim.Driver)
			default:
				if text := unknownAttribute(attribute{domain, name}); text != "" {
					c.fail("%s: %s: %s", c.at(object, at+"."+key[0]), key[1], text)
				}
			}
		}
	}
}

// checkRequestNames reports each name in a list of requests that is no request of the claim.
func (c *checker) checkRequestNames(object, path string, names []string, requests []namedRequest) {
	for i, name := range names {
		if !slices.ContainsFunc(requests, func(r namedRequest) bool { return (claimEntry{requests: []string{name}}).appliesTo(r.Name) }) {
			c.fail("%s: no request %q", c.at(object, fmt.Sprintf("%s.requests[%d]", path, i)), name)
		}
	}
}
