// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// maxAttribute is the maximum size of an attribute in a ResourceSlice in bytes, and so of a resource's full name, which is one.
const maxAttribute = 64

func (r *reader) readDRA(v strict.Value, t *Taints) {
	effect := func(to *string) func(strict.Value) {
		return strict.To(r.Report, to, strict.OneOf("NoSchedule", "NoExecute", "None", NoTaint))
	}
	r.Object(v, strict.Fields{"taints": func(v strict.Value) {
		r.Object(v, strict.Fields{"linkDown": effect(&t.LinkDown), "unhealthy": effect(&t.Unhealthy), "gone": effect(&t.Gone)})
	}})
}

// readVF reads the key "vf": the configuration for the DeviceClass of a resource.
func (r *reader) readVF(v strict.Value) *vfconfig.Config {
	c := &vfconfig.Config{}
	before := len(r.Problems)
	keys := r.Object(v, c.Fields(r.Report))
	for _, key := range []string{"mac", "ips"} {
		if c.Has(key) {
			r.Fail(keys[key], "all VFs of the class would share it: set it in claims")
		}
	}
	if err := c.Validate(); err != nil && len(r.Problems) == before {
		r.Fail(v.Place, "%v", err)
	}
	return c
}

// readClaimMay reads claimMay, the keys that claims may set. Each item is a key, or an object of keys with their limits.
func (r *reader) readClaimMay(v strict.Value) vfconfig.Allowance {
	a := vfconfig.Allowance{}
	r.Each(func(v strict.Value) {
		switch data := v.Data.(type) {
		case string:
			if err := a.Allow(data); err != nil {
				r.Fail(v.Place, "%s: %v", v, err)
			}
		case strict.Object:
			r.Members(func(v strict.Value) {
				if err := a.Limit(v.Name, v); err != nil {
					r.Fail(v.Place, "%v", err)
				}
			})(v)
		default:
			r.Fail(v.Place, "%s: want a key, or an object of keys with their limits", v)
		}
	})(v)
	return a
}

// checkAPI reports an error for each key that has no effect with the API of the resource.
func (r *reader) checkAPI(v strict.Value, res *Resource) {
	if res.API == DRA && res.ClaimMay == nil {
		res.ClaimMay = vfconfig.DefaultAllowance()
	}
	object, _ := v.Data.(strict.Object)
	for _, m := range object {
		key := strings.ToLower(m.Name)
		switch instead := insteadInDRA()[key]; {
		case m.Data == nil:
		case res.API != DRA && (key == "vf" || key == "claimmay"):
			r.Fail(m.Place, `has no effect: want "api": "dra" beside it`)
		case res.API == DRA && instead != "":
			r.Fail(m.Place, `has no effect with "api": "dra": remove it; %s`, instead)
		case res.API == DRA && key == "unknownnuma" && res.UnknownNUMA == unknownAll:
			r.Fail(m.Place, `"all" has no effect with "api": "dra": want omit, exclude`)
		}
	}
	if n := len(res.FullName()); res.API == DRA && res.Name != "" && n > maxAttribute {
		r.Fail(res.Place, `resource %s: %d bytes: want at most %d with "api": "dra", prefix included`, res.FullName(), n, maxAttribute)
	}
}

// insteadInDRA returns, for each key of the device plugin API only, what replaces it in DRA.
func insteadInDRA() map[string]string {
	const selected = "claims select devices by selectors and constraints, such as matchAttribute resource.kubernetes.io/numaNode"
	return map[string]string{
		"policy": selected, "splitbynuma": selected, "excludetopology": selected, "cdi": "claims always get device files by CDI",
		"linkdown": "dra.taints.linkDown is for all resources",
	}
}

// excludedVFs returns how many VFs pods cannot use while a pod has the whole PF: 0 unless the device is a PF that is offered as a
// whole.
func (c *Config) excludedVFs(d subject) int {
	i := c.entryOf(d)
	if i < 0 || !c.PFs[i].Whole {
		return 0
	}
	return max(c.PFs[i].NumVFs, d.NumVFs)
}

// whyNotWhole returns why a resource cannot contain a PF that is offered as a whole, or "". A selector must name the PF's PCI address
// or ACPI index. Otherwise, it would also be in resources for VFs, and the scheduler would allocate it to claims for a VF.
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
