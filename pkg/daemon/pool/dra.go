// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/vfconfig"
)

// maxAttribute is the maximum size of an attribute in a ResourceSlice in bytes. This maximum also applies to the full name of a resource,
// because ResourceSlices contain this name as an attribute.
const maxAttribute = 64

// readDRA reads the section "dra" of the configuration.
func (r *reader) readDRA(v value, t *Taints) {
	effect := func(to *string) func(value) { return oneOf(r, to, "NoSchedule", "NoExecute", "None", NoTaint) }
	r.readObject(v, []field{{"taints", func(v value) {
		r.readObject(v, []field{{"linkDown", effect(&t.LinkDown)}, {"unhealthy", effect(&t.Unhealthy)}, {"gone", effect(&t.Gone)}})
	}}})
}

// readVF reads the key "vf": the configuration for the DeviceClass of a resource.
func (r *reader) readVF(v value) *vfconfig.Config {
	c := &vfconfig.Config{}
	var fields []field
	for _, key := range vfconfig.Keys() {
		fields = append(fields, field{key, func(v value) {
			switch err := c.Put(key, v.asAny()); {
			case err != nil:
				r.fail(v.Place, "%v", err)
			case key == "mac" || key == "ips":
				r.fail(v.Place, "all VFs of the class would share it: set it in claims")
			}
		}})
	}
	before := len(r.problems)
	if r.readObject(v, fields); len(r.problems) == before {
		if err := c.Validate(); err != nil {
			r.fail(v.Place, "%v", err)
		}
	}
	return c
}

// readClaimMay reads the list "claimMay" of the keys that claims may set. An item of the list "claimMay" is either a key or an object. Each
// member of this object is a key with its limit.
func (r *reader) readClaimMay(v value) vfconfig.Allowance {
	a := vfconfig.Allowance{}
	r.listOf(func(v value) {
		switch v.kind {
		case text:
			if err := a.Allow(v.text); err != nil {
				r.fail(v.Place, "%+.40q: %v", v.text, err)
			}
		case object:
			for _, m := range v.members {
				if err := a.Limit(m.key, m.value.asAny()); err != nil {
					r.fail(m.value.Place, "%v", err)
				}
			}
		default:
			r.hasKind(v, "a key, or an object of keys with their limits")
		}
	})(v)
	return a
}

// checkAPI reports an error for each key that has no effect with the API of the resource.
func (r *reader) checkAPI(v value, res *Resource) {
	if res.API == DRA && res.ClaimMay == nil {
		res.ClaimMay = vfconfig.DefaultAllowance()
	}
	for _, m := range v.members {
		if m.value.kind == null {
			continue
		}
		switch key := strings.ToLower(m.key); {
		case res.API != DRA && (key == "vf" || key == "claimmay"):
			r.fail(m.value.Place, `has no effect: want "api": "dra" beside it`)
		case res.API == DRA && (key == "policy" || key == "splitbynuma" || key == "excludetopology" || key == "cdi"):
			r.fail(m.value.Place, `has no effect with "api": "dra": remove it; %s`, draReplacement(key))
		case res.API == DRA && key == "unknownnuma" && res.UnknownNUMA == unknownAll:
			r.fail(m.value.Place, `"all" has no effect with "api": "dra": want omit, exclude`)
		}
	}
	if n := len(res.FullName()); res.API == DRA && res.Name != "" && n > maxAttribute {
		r.fail(res.Place, `resource %s: %d bytes: want at most %d with "api": "dra", prefix included`, res.FullName(), n, maxAttribute)
	}
}

// draReplacement returns a text about the DRA feature that replaces a key of the device plugin API.
func draReplacement(key string) string {
	if key == "cdi" {
		return "claims always get device files by CDI"
	}
	return "claims select devices by selectors and constraints, such as matchAttribute resource.kubernetes.io/numaNode"
}

// asAny converts a value to the Go type that encoding/json with UseNumber would return.
func (v value) asAny() any {
	switch v.kind {
	case boolean:
		return v.yes
	case number:
		return json.Number(v.text)
	case text:
		return v.text
	case list:
		items := make([]any, len(v.items))
		for i, item := range v.items {
			items[i] = item.asAny()
		}
		return items
	case object:
		return map[string]any{}
	}
	return nil
}

// excludedVFs returns the number of VFs that pods cannot use while a pod has the whole PF. If the PF is not offered as a whole, or if the
// device is not a PF, excludedVFs returns 0.
func (c *Config) excludedVFs(d subject) int {
	i := c.entryOf(d)
	if i < 0 || !c.PFs[i].Whole {
		return 0
	}
	return max(c.PFs[i].NumVFs, d.NumVFs)
}

// whyNotWhole checks a PF that is offered as a whole. The result of whyNotWhole is the reason why a resource cannot contain this PF, or ""
// if the resource can contain it. A selector of the resource must contain the PCI address or the ACPI index of the PF. Without this rule,
// the PF would also be in resources for VFs, and the scheduler would allocate the PF to claims that request a VF.
func (c *Config) whyNotWhole(r *Resource, selector int, d subject) string {
	switch {
	case c.excludedVFs(d) == 0:
		return ""
	case r.API != DRA:
		return `it is offered as a whole (offerWhole), which requires "api": "dra" in the resource`
	case selector < 0 || !slices.ContainsFunc(r.Selectors[selector].Conditions, func(c condition) bool {
		return c.Name == "pciAddresses" || c.Name == "acpiIndexes"
	}):
		return "it is offered as a whole (offerWhole), which requires a selector that names it by pciAddresses or acpiIndexes"
	}
	return ""
}
