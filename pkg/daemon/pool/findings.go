// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/strict"
)

// Findings returns warnings about a configuration on this node, such as devices that the node does not have, in the order of the
// configuration. They are no errors, because nodes with different devices may use the same configuration.
func Findings(c *Config, s *pci.Snapshot, env Env) []strict.Problem {
	f := findings{node: newNode(s, env), c: c, Report: strict.Report{Notes: slices.Clone(c.Notes)}}
	if s.NoBus && len(c.Resources) > 0 {
		f.Note(c.Resources[0].Place, "this node has no PCI bus, so no resource has a device")
		return f.Notes
	}
	f.verdicts = c.matchAll(f.node)
	for i := range c.Resources {
		if len(c.Resources[i].Unserved) > 0 {
			continue // Unserved reports it
		}
		f.reportSelectors(&c.Resources[i])
		f.reportDevices(i)
		f.reportRefused(i)
	}
	if s.ExclusiveRDMA {
		f.Notes = append(f.Notes, c.withExclusiveRDMA()...)
	}
	for i := range c.PFs {
		f.reportPF(i)
	}
	strict.Sort(f.Notes)
	return f.Notes
}

type findings struct {
	*node
	c        *Config
	verdicts []verdict
	strict.Report
}

// reportSelectors reports the values in a resource's selectors that no device of this node has.
func (f *findings) reportSelectors(r *Resource) {
	open := len(r.Selectors) == 0
	for _, s := range r.Selectors {
		open = open || len(s.Conditions) == 0
		for _, c := range s.Conditions {
			missing := c.test.missing(f.node)
			for _, text := range missing {
				f.Note(c.Place, "%s", text)
			}
			if len(missing) == 0 {
				f.reportUnmet(r, c)
			}
		}
	}
	if open {
		f.Note(r.Place, "resource %s: a selector is missing or empty: the resource takes every remaining network device", r.FullName())
	}
}

// reportUnmet reports a condition that no device meets, and the values that the devices have.
func (f *findings) reportUnmet(r *Resource, c condition) {
	var have []string
	for _, d := range f.subjects {
		d.bindTo, d.held = r.Driver, f.isFrom(r, d.Address)
		if c.met(d) {
			return
		}
		if v := quoteEmpty(c.test.found(d)); !slices.Contains(have, v) {
			have = append(have, v)
		}
	}
	slices.Sort(have)
	if more := len(have) - maxValues; more > 0 {
		have = append(have[:maxValues], fmt.Sprintf("and %d more", more))
	}
	f.Note(c.Place, "no device on this node has %s; values found: %s", c.test.want(), orNone(strings.Join(have, ", ")))
}

// maxValues is the maximum number of values in a finding.
const maxValues = 20

// reportDevices reports a resource that no device matches, or whose matching devices are not available.
func (f *findings) reportDevices(i int) {
	r := &f.c.Resources[i]
	offered, matched, unknown, why, unmet := 0, 0, 0, "", ""
	for _, v := range f.verdicts {
		if a := v.answers[i]; !a.Matches && !f.Devices[v.device].IsVF() && a.meets() && unmet == "" {
			unmet = fmt.Sprintf("; %s: %s", f.Devices[v.device].Address, a.Reason)
		}
		if v.answers[i].Matches {
			if matched++; why == "" {
				why = fmt.Sprintf("%s: %s", f.Devices[v.device].Address, v.answers[i].Reason)
			}
		}
		if v.resource == i {
			offered++
			if !f.nodeKnown(&f.Devices[v.device]) {
				unknown++
			}
		}
	}
	switch {
	case matched == 0:
		f.Note(r.Place, "resource %s: no device on this node matches%s", r.FullName(), unmet)
	case offered == 0:
		f.Note(r.Place, "resource %s: %s on this node, but none is available; %s", r.FullName(),
			plural(matched, "device matches", "devices match"), why)
	case f.multiNUMA() && unknown > 0 && unknown < offered:
		f.reportUnknownNodes(r, unknown)
	}
}

// reportUnknownNodes reports a resource that contains devices with a known NUMA node and devices with an unknown NUMA node.
func (f *findings) reportUnknownNodes(r *Resource, unknown int) {
	switch name := r.FullName() + noNUMA; {
	case r.SplitByNUMA || !r.maySplit(noNUMA):
	case len(r.Name)+len(noNUMA) > maxName:
		f.Note(r.Place, "resource %s: the NUMA node of %s is unknown: the Topology Manager ignores them; shorten the name so that they get a separate resource",
			r.FullName(), plural(unknown, "device", "devices"))
	default:
		f.Note(r.Place, `resource %s: the NUMA node of %s is unknown: offered as %s; set "unknownNuma": "all" to keep them in the resource`,
			r.FullName(), plural(unknown, "device", "devices"), name)
	}
}

// reportPF reports an entry of the list pfs that does not fit the PFs of this node.
func (f *findings) reportPF(i int) {
	want := &f.c.PFs[i]
	at := slices.IndexFunc(f.subjects, want.matches)
	if at < 0 {
		if want.Name != "" {
			f.Note(want.Place, "no PF %q on this node; PFs here: %s", want.Name, orNone(strings.Join(f.pfs(pfName), ", ")))
			return
		}
		f.Note(want.Place, "no PF %s on this node; PFs here: %s", want.Address, orNone(strings.Join(f.pfs(rootDevice), ", ")))
		return
	}
	d := f.subjects[at]
	if want.NumVFs > d.TotalVFs && d.HasNoPF() {
		f.Note(want.Place, "numVfs %d: %s is no PF, so it can have no VFs", want.NumVFs, d.Address)
	} else if want.NumVFs > d.TotalVFs {
		f.Note(want.Place, "numVfs %d: %s supports at most %d", want.NumVFs, d.Address, d.TotalVFs)
	}
	if v := f.verdicts[at]; want.Whole && v.resource < 0 {
		why := `want one with "api": "dra" and a selector with pciAddresses`
		if slices.ContainsFunc(v.answers, Answer.meets) {
			why = whyUnmatched(v.answers)
		}
		f.Note(want.Place, "offerWhole: no resource matches %s: %s", d.Address, why)
	}
	for _, first := range f.c.PFs[:i] {
		if first.matches(d) {
			f.Note(want.Place, "ignored: %s in line %d is for the same PF, %s", first.Key, first.Line, d.Address)
		}
	}
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
