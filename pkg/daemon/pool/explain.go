// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/strict"
)

// Explanation contains the resource that offers a device, and the reason.
type Explanation struct {
	Device   pci.Address `json:"device"`
	Resource string      `json:"resource,omitempty"` // full name; "" if no resource offers the device
	Reason   string      `json:"reason"`             // one line
	Answers  []Answer    `json:"answers,omitempty"`  // one for each resource, in the order of the configuration
}

// Answer says whether a device matches one resource, and why.
type Answer struct {
	strict.Place
	Resource  string           `json:"resource"` // without the suffix of a NUMA node
	Matches   bool             `json:"matches"`
	Reason    string           `json:"reason"`
	Selectors []selectorAnswer `json:"selectors,omitempty"`
}

// selectorAnswer says whether a device matches one selector, and which conditions the device meets.
type selectorAnswer struct {
	strict.Place
	Met    bool              `json:"met"`
	Checks []conditionResult `json:"checks,omitempty"`
}

// conditionResult says whether a device meets one condition.
type conditionResult struct {
	strict.Place
	Name  string `json:"name"` // the key, such as pfNames
	Want  string `json:"want"`
	Found string `json:"found"`
	Met   bool   `json:"met"`
}

// Explain returns, for each device, the reason why the device is offered or not offered.
func Explain(c *Config, s *pci.Snapshot, env Env) []Explanation {
	names := map[pci.Address]string{}
	for _, p := range Assign(c, s, env) {
		for _, d := range p.Devices {
			names[d.Address] = p.Name
		}
	}
	n := newNode(s, env)
	verdicts := c.matchAll(n)
	out := make([]Explanation, len(verdicts))
	for i, v := range verdicts {
		e := Explanation{Device: s.Devices[i].Address, Answers: v.answers}
		switch e.Resource = names[e.Device]; {
		case v.whyBusy != "":
			e.Reason = "not offered: " + v.whyBusy
		case v.resource < 0:
			e.Reason = "not offered: " + whyUnmatched(v.answers)
		case len(c.Resources[v.resource].Unserved) > 0:
			r := &c.Resources[v.resource]
			e.Reason = fmt.Sprintf("not offered: %s in line %d matches it but is not served: %s", r.FullName(), r.Line, r.Unserved[0].Text)
		default:
			e.Reason = "offered: " + v.answers[v.resource].Reason
			if why, _ := sriov.Refusal(n.subjects[i].Device, *n.subjects[i].pf); why != "" {
				e.Reason += "; the plugin sriov refuses it: " + why
			}
		}
		out[i] = e
	}
	return out
}

// whyUnmatched returns why no resource has a device: what the first one says of which the device meets a selector.
func whyUnmatched(answers []Answer) string {
	if i := slices.IndexFunc(answers, Answer.meets); i >= 0 {
		return answers[i].Reason
	}
	return "no resource matches"
}

// meets reports whether the device meets a selector.
func (a Answer) meets() bool {
	return slices.ContainsFunc(a.Selectors, func(s selectorAnswer) bool { return s.Met })
}

// verdict is the assignment of one device to a resource.
type verdict struct {
	device   int    // index in the snapshot
	whyBusy  string // why no resource can have it
	resource int    // -1 for none
	selector int    // that the device meets, -1 if the resource has no selectors
	answers  []Answer
}

// matchAll assigns each device to the first resource that it matches, but a pod's device to its resource if it still matches that.
func (c *Config) matchAll(n *node) []verdict {
	out := make([]verdict, len(n.subjects))
	for i, d := range n.subjects {
		v := verdict{device: i, whyBusy: c.whyBusy(n, i), resource: -1, selector: -1}
		for k := range c.Resources {
			a, selector := c.answerFor(&c.Resources[k], n, d)
			switch {
			case !a.Matches:
			case v.whyBusy != "":
				a.Reason = v.whyBusy
			case v.resource >= 0 && !n.isFrom(&c.Resources[k], d.Address):
				a.Reason = fmt.Sprintf("already taken by %s in line %d", c.Resources[v.resource].FullName(), c.Resources[v.resource].Line)
			default:
				v.resource, v.selector = k, selector
			}
			v.answers = append(v.answers, a)
		}
		out[i] = v
	}
	return out
}

// answerFor compares a device with a resource as if there were no other. The second result is the first selector that the device meets,
// or -1.
func (c *Config) answerFor(r *Resource, n *node, d subject) (Answer, int) {
	d.bindTo, d.held = r.Driver, n.isFrom(r, d.Address)
	a, selector, unnamed := Answer{Place: r.Place, Resource: r.FullName()}, -1, d.HasNoPF() && len(r.Selectors) == 0
	for i, s := range r.Selectors {
		a.Selectors = append(a.Selectors, s.answerFor(d))
		switch {
		case !a.Selectors[i].Met || selector >= 0:
		case d.HasNoPF() && !s.names():
			unnamed = true
		default:
			selector = i
		}
	}
	switch {
	case r.otherType:
		a.Reason = r.Unserved[0].Text
	case r.UnknownNUMA == unknownExclude && n.multiNUMA() && !n.nodeKnown(&d.Device):
		a.Reason = "its NUMA node is unknown, and unknownNuma is exclude"
	case unnamed && selector < 0:
		a.Reason = "it has no PF, which requires a selector that names it by vendors and devices, or by pciAddresses"
	case len(r.Selectors) > 0 && selector < 0:
		a.Reason = whyUnmet(a.Selectors)
	default:
		if a.Reason = cmp.Or(c.whyNotWhole(r, selector, d), r.whyNeedsPF(d)); a.Reason == "" {
			a.Matches, a.Reason = true, r.whyMet(selector)
		}
	}
	return a, selector
}

func (s *selector) answerFor(d subject) selectorAnswer {
	a := selectorAnswer{Place: s.Place, Met: true}
	for _, c := range s.Conditions {
		check := conditionResult{c.Place, c.Name, c.test.want(), c.test.found(d), c.met(d)}
		a.Met = a.Met && check.Met
		a.Checks = append(a.Checks, check)
	}
	return a
}

// names reports whether the selector names devices by vendor and device ID, or by address.
func (s *selector) names() bool {
	has := func(key string) bool {
		return slices.ContainsFunc(s.Conditions, func(c condition) bool { return c.Name == key })
	}
	return has("pciAddresses") || has("vendors") && has("devices")
}

// whyNeedsPF returns why a function cannot have the settings of a resource, because only the PF of a VF sets them, or "".
func (r *Resource) whyNeedsPF(d subject) string {
	key := r.VF.NeedsPF(false) // a resource sets no MAC
	switch {
	case key == "" || d.IsVF():
		return ""
	case d.IsPF():
		return fmt.Sprintf("it is a PF, and only VFs have %s %s of vf", key, r.VF.Text(key))
	}
	return fmt.Sprintf("it has no PF, which alone can set %s %s of vf", key, r.VF.Text(key))
}

// whyUnmet returns why a device meets none of the selectors.
func whyUnmet(selectors []selectorAnswer) string {
	if len(selectors) > 1 {
		return "meets no selector"
	}
	checks := selectors[0].Checks
	c := checks[slices.IndexFunc(checks, func(c conditionResult) bool { return !c.Met })]
	return fmt.Sprintf("%s is %s, not %s", c.Name, quoteEmpty(c.Found), c.Want)
}

// whyMet returns why a resource has a device that meets the given selector.
func (r *Resource) whyMet(selector int) string {
	switch {
	case len(r.Unserved) > 0:
		return r.Unserved[0].Text
	case selector >= 0:
		return "meets " + r.Selectors[selector].Key
	}
	return "has no selectors"
}

func quoteEmpty(s string) string { return cmp.Or(s, `""`) }
