// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"

	"github.com/podlace/podlace/pkg/pci"
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
	verdicts := c.matchAll(newNode(s, env), true)
	out := make([]Explanation, len(verdicts))
	for i, v := range verdicts {
		e := Explanation{Device: s.Devices[i].Address, Answers: v.answers}
		switch e.Resource = names[e.Device]; {
		case v.whyBusy != "":
			e.Reason = "not offered: " + v.whyBusy
		case v.resource < 0:
			e.Reason = "not offered: no resource matches"
		case len(c.Resources[v.resource].Unserved) > 0:
			r := &c.Resources[v.resource]
			e.Reason = fmt.Sprintf("not offered: %s in line %d matches it but is not served: %s", r.FullName(), r.Line, r.Unserved[0].Text)
		default:
			e.Reason = "offered: " + v.answers[v.resource].Reason
		}
		out[i] = e
	}
	return out
}

// The type verdict is the assignment of one device to a resource.
type verdict struct {
	device   int    // index in the snapshot
	whyBusy  string // why no resource can have it
	resource int    // -1 for none
	selector int    // that the device meets, -1 if the resource has no selectors
	answers  []Answer
}

// matchAll assigns each device to a resource. If the last argument of matchAll is true, matchAll also compares each device with the
// resources after the first match, and stores the reason for each resource.
func (c *Config) matchAll(n *node, all bool) []verdict {
	out := make([]verdict, len(n.subjects))
	for i, d := range n.subjects {
		v := verdict{device: i, whyBusy: c.whyBusy(n, i), resource: -1, selector: -1}
		for k := range c.Resources {
			if !all && (v.whyBusy != "" || v.resource >= 0) {
				break
			}
			r := &c.Resources[k]
			selector, why := r.firstMatch(n, d)
			why = cmp.Or(why, c.whyNotWhole(r, selector, d))
			if all {
				v.answers = append(v.answers, r.answerFor(d, why, v.whyNotOffered(c, why)))
			}
			if why == "" && v.whyBusy == "" && v.resource < 0 {
				v.resource, v.selector = k, selector
			}
		}
		out[i] = v
	}
	return out
}

// firstMatch returns the index of the resource's first selector that matches the device. If the resource has no selectors, firstMatch
// returns -1. If the device does not match the resource, firstMatch returns the reason.
func (r *Resource) firstMatch(n *node, d subject) (int, string) {
	d.bindTo = r.Driver
	if r.otherType {
		return -1, r.Unserved[0].Text
	}
	if r.UnknownNUMA == unknownExclude && n.multiNUMA() && !n.nodeKnown(&d.Device) {
		return -1, "its NUMA node is unknown, and unknownNuma is exclude"
	}
	why := ""
	for i := range r.Selectors {
		if why = r.Selectors[i].firstUnmet(d); why == "" {
			return i, ""
		}
	}
	if len(r.Selectors) > 1 {
		why = "meets no selector"
	}
	return -1, why
}

// firstUnmet returns a description of the first condition that a device does not meet, or "" if the device meets all conditions.
func (s *selector) firstUnmet(d subject) string {
	for _, c := range s.Conditions {
		if !c.test.met(d) {
			return fmt.Sprintf("%s is %s, not %s", c.Name, quoteEmpty(c.test.found(d)), c.test.want())
		}
	}
	return ""
}

func quoteEmpty(s string) string {
	if s == "" {
		return `""`
	}
	return s
}

// whyNotOffered returns the reason why a resource does not offer a device, or "" if the resource offers the device. If the device does not
// match the resource, the last argument of whyNotOffered is the reason.
func (v *verdict) whyNotOffered(c *Config, why string) string {
	switch {
	case why != "":
		return why
	case v.whyBusy != "":
		return v.whyBusy
	case v.resource >= 0:
		return fmt.Sprintf("already taken by %s in line %d", c.Resources[v.resource].FullName(), c.Resources[v.resource].Line)
	}
	return ""
}

// answerFor returns the Answer for a device and a resource. The second argument of answerFor is the reason why the device does not match
// the resource, or "". The last argument of answerFor is the reason why the resource does not offer the device, or "".
func (r *Resource) answerFor(d subject, why, refusal string) Answer {
	a := Answer{Place: r.Place, Resource: r.FullName(), Matches: why == "", Reason: refusal}
	if a.Reason == "" && len(r.Unserved) > 0 {
		a.Reason = r.Unserved[0].Text
	}
	d.bindTo = r.Driver
	for _, s := range r.Selectors {
		answer := selectorAnswer{Place: s.Place, Met: true}
		for _, c := range s.Conditions {
			met := c.test.met(d)
			answer.Met = answer.Met && met
			answer.Checks = append(answer.Checks, conditionResult{c.Place, c.Name, c.test.want(), c.test.found(d), met})
		}
		if a.Reason == "" && answer.Met {
			a.Reason = "meets " + s.Key
		}
		a.Selectors = append(a.Selectors, answer)
	}
	if a.Reason == "" {
		a.Reason = "has no selectors"
	}
	return a
}
