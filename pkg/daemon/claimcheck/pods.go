// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// checkPods checks the pod or the pod templates of an object.
func (c *checker) checkPods(m manifest) {
	if m.kind() == "Pod" && m.root.Get("spec").Data == nil {
		c.fail("%s is missing", m.at("spec"))
	}
	m.root.Walk(func(v *strict.Value) {
		if v.Name == "spec" && (v.Get("containers").Data != nil || v.Get("resourceClaims").Data != nil) {
			c.checkPod(m, strings.TrimPrefix(v.Key, m.root.Key+"."), *v)
		}
	})
}

// checkPod checks that the files contain all claims of a pod, that no two of them set the same MAC address, interface name or IP
// addresses, and the pod's extended resources.
func (c *checker) checkPod(m manifest, path string, value strict.Value) {
	var spec corev1.PodSpec
	c.decode(m, value, &spec, !strings.Contains(m.root.Get("apiVersion").Text(), ".")) // types of other projects have keys of their own
	claims := make([][]served, len(spec.ResourceClaims))
	for i, pc := range spec.ResourceClaims {
		at := m.at(fmt.Sprintf("%s.resourceClaims[%d]", path, i))
		kind, name := kindClaim, pc.ResourceClaimName
		if name == nil {
			kind, name = kindTemplate, pc.ResourceClaimTemplateName
		}
		if name == nil || pc.ResourceClaimName != nil && pc.ResourceClaimTemplateName != nil {
			c.fail("%s: want resourceClaimName or resourceClaimTemplateName", at)
			continue
		}
		id := [3]string{kind, m.namespace(), *name}
		if !slices.ContainsFunc(c.objects, func(o manifest) bool { return o.id() == id }) {
			c.fail("%s: %s %s is in none of the files and was not checked", at, kind, *name)
			continue
		}
		c.checked++
		same := func(o corev1.PodResourceClaim) bool {
			return kind == kindClaim && ptr.Deref(o.ResourceClaimName, "") == *name
		}
		if slices.ContainsFunc(spec.ResourceClaims[:i], same) {
			continue
		}
		claims[i] = c.claims[id]
		for k := range i {
			if text := sharedSetting(claims[i], claims[k]); text != "" {
				c.fail("%s: claim %s: %s: %s of the pod sets the same value, and only one VF of a pod can have it", at, pc.Name, text,
					spec.ResourceClaims[k].Name)
			}
		}
	}
	for i, container := range spec.InitContainers {
		c.checkContainer(m, fmt.Sprintf("%s.initContainers[%d]", path, i), container, spec.ResourceClaims)
	}
	for i, container := range spec.Containers {
		c.checkContainer(m, fmt.Sprintf("%s.containers[%d]", path, i), container, spec.ResourceClaims)
	}
}

// checkContainer checks the claims that a container uses, and its limits for extended resources of a class.
func (c *checker) checkContainer(m manifest, path string, container corev1.Container, claims []corev1.PodResourceClaim) {
	for i, used := range container.Resources.Claims {
		if !slices.ContainsFunc(claims, func(pc corev1.PodResourceClaim) bool { return pc.Name == used.Name }) {
			c.fail("%s: the pod has no claim %q", m.at(fmt.Sprintf("%s.resources.claims[%d].name", path, i)), used.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(container.Resources.Limits)) {
		one, ok := c.class(func(d class) bool {
			return d.Spec.ExtendedResourceName != nil && *d.Spec.ExtendedResourceName == string(name) ||
				resourceapi.ResourceDeviceClassPrefix+d.Name == string(name)
		})
		limit := manifest{m.root, ", container " + container.Name, fmt.Sprintf("%s.resources.limits.%s", path, name)}
		if class, byClass := strings.CutPrefix(string(name), resourceapi.ResourceDeviceClassPrefix); ok {
			count := container.Resources.Limits[name]
			exact := &resourceapi.ExactDeviceRequest{DeviceClassName: one.Name, Count: count.Value()}
			c.checkDevices(limit, "", resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "vf", Exactly: exact}}})
		} else if byClass {
			c.unknownClass(limit.at(""), class, false)
		}
	}
}

// sharedSetting returns a setting that requests of both lists have, although only one VF of a pod can have it, or "".
func sharedSetting(list, others []served) string {
	for _, r := range list {
		for _, s := range r.Settings {
			same := func(o setting) bool { return o.Key == s.Key && strings.EqualFold(o.Value, s.Value) }
			single := s.Key == "mac" || s.Key == "ips" || s.Key == "ifName" && !strings.Contains(s.Value, vfconfig.IndexMark)
			if single && slices.ContainsFunc(others, func(o served) bool { return slices.ContainsFunc(o.Settings, same) }) {
				return s.Key + " " + s.Value
			}
		}
	}
	return ""
}
