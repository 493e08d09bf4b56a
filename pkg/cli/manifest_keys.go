// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"maps"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
)

// apiKeys contains the keys of an object in the API resource.k8s.io/v1. If the value of a key is nil, the keys below it are not checked.
type apiKeys map[string]apiKeys

// specKeys returns the keys in the specification of each kind of object that check-claim reads.
func specKeys() map[string]apiKeys {
	selectors := apiKeys{"cel": {"expression": nil}}
	opaque := apiKeys{"driver": nil, "parameters": nil}
	sub := apiKeys{"name": nil, "deviceClassName": nil, "selectors": selectors, "allocationMode": nil, "count": nil, "tolerations": nil,
		"capacity": nil, "derivedAttributes": nil}
	exactly := maps.Clone(sub)
	delete(exactly, "name")
	exactly["adminAccess"] = nil
	claim := apiKeys{"devices": {
		"requests":    {"name": nil, "exactly": exactly, "firstAvailable": sub},
		"constraints": {"requests": nil, "matchAttribute": nil, "distinctAttribute": nil},
		"config":      {"requests": nil, "opaque": opaque},
	}}
	return map[string]apiKeys{kindClaim: claim, kindTemplate: {"metadata": nil, "spec": claim},
		kindClass: {"selectors": selectors, "config": {"opaque": opaque}, "extendedResourceName": nil}}
}

// checkKeys reports the unknown keys in the specification of an object. For an unknown key that does not resemble a known key, checkKeys
// only prints a notice, because a newer version of Kubernetes may know the key.
func (c *checker) checkKeys(m manifest) {
	all := specKeys()[m.Kind]
	c.walkKeys(m, m.root.Get("spec"), all, all)
}

func (c *checker) walkKeys(m manifest, v strict.Value, known, all apiKeys) {
	for _, item := range v.Items() {
		c.walkKeys(m, item, known, all)
	}
	object, _ := v.Data.(strict.Object)
	for _, member := range object {
		below, ok := known[member.Name]
		if ok {
			if below != nil {
				c.walkKeys(m, member, below, all)
			}
			continue
		}
		at := m.at(strings.TrimPrefix(member.Key, m.root.Key+"."))
		place := all.find("spec", member.Name)
		near := strict.Nearest(member.Name, slices.Sorted(maps.Keys(known)))
		switch {
		case near != "":
			c.fail("%s: unknown key; did you mean %s?", at, near)
		case place != "":
			c.fail("%s: unknown key; the key %s belongs to %s", at, member.Name, place)
		default:
			c.notice("%s: this version of podlace does not know the key", at)
		}
	}
}

// find returns the path of the first object that has the given key. find returns "" if no object has the key.
func (k apiKeys) find(path, key string) string {
	for _, name := range slices.Sorted(maps.Keys(k)) {
		if name == key {
			return path
		}
		if place := k[name].find(path+"."+name, key); place != "" {
			return place
		}
	}
	return ""
}
