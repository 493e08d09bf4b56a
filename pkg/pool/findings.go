// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

// Findings returns what an admin should know about a configuration on this node, in the order of the configuration. None of it is an error:
// a configuration may serve many nodes, of which each lacks something.
func Findings(c *Config, s *pci.Snapshot, env Env) []Problem {
	f := findings{node: newNode(s, env), c: c, out: slices.Clone(c.Notes)}
	f.verdicts = c.judge(f.node, true)
	for i := range c.Resources {
		if len(c.Resources[i].Unserved) > 0 {
			continue // Unserved tells it
		}
		f.selectors(&c.Resources[i])
		f.devices(i)
	}
	for i := range c.PFs {
		f.pf(i)
	}
	byLine(f.out)
	return f.out
}

type findings struct {
	*node
	c        *Config
	verdicts []verdict
	out      []Problem
}

func (f *findings) add(at Place, format string, args ...any) {
	f.out = append(f.out, Problem{at, fmt.Sprintf(format, args...)})
}

// selectors reports what is selected by and is not on this node.
func (f *findings) selectors(r *Resource) {
	open := len(r.Selectors) == 0
	for _, s := range r.Selectors {
		open = open || len(s.Conditions) == 0
		for _, c := range s.Conditions {
			missing := c.test.missing(f.node)
			for _, text := range missing {
				f.add(c.Place, "%s", text)
			}
			if len(missing) == 0 {
				f.unmet(r, c)
			}
		}
	}
	if open {
		f.add(r.Place, "resource %s: a selector is missing or empty: it takes every network device that is left", r.FullName())
	}
}

// unmet reports a condition that no device meets, with what the devices have.
func (f *findings) unmet(r *Resource, c condition) {
	var have []string
	for _, d := range f.subjects {
		d.bindTo = r.Driver
		if c.test.met(d) {
			return
		}
		if v := quoteEmpty(c.test.found(d)); !slices.Contains(have, v) {
			have = append(have, v)
		}
	}
	slices.Sort(have)
	if more := len(have) - mostValues; more > 0 {
		have = append(have[:mostValues], fmt.Sprintf("and %d more", more))
	}
	f.add(c.Place, "no device on this node is of %s; there are: %s", c.test.want(), orNone(strings.Join(have, ", ")))
}

// mostValues is how many values a finding lists.
const mostValues = 20

// devices reports what became of the devices that a resource matches.
func (f *findings) devices(i int) {
	r := &f.c.Resources[i]
	offered, matched, unknown, why := 0, 0, 0, ""
	for _, v := range f.verdicts {
		if v.answers[i].Matches {
			if matched++; why == "" {
				why = fmt.Sprintf("%s: %s", f.Devices[v.device].Address, v.answers[i].Reason)
			}
		}
		if v.resource == i {
			offered++
			if !f.located(&f.Devices[v.device]) {
				unknown++
			}
		}
	}
	switch {
	case matched == 0:
		f.add(r.Place, "resource %s: no device on this node matches", r.FullName())
	case offered == 0:
		f.add(r.Place, "resource %s: %s on this node, none of which is left for it; %s", r.FullName(),
			plural(matched, "device matches", "devices match"), why)
	case f.several() && unknown > 0 && unknown < offered:
		f.mixed(r, unknown)
	}
}

// mixed reports devices whose NUMA node is unknown beside others.
func (f *findings) mixed(r *Resource, unknown int) {
	switch name := r.FullName() + noNUMA; {
	case r.SplitByNUMA || !r.splits(noNUMA):
	case len(r.Name)+len(noNUMA) > maxName:
		f.add(r.Place, "resource %s: the NUMA node of %s is unknown, and the name is too long to offer them apart: the Topology Manager will not count them",
			r.FullName(), plural(unknown, "device", "devices"))
	default:
		f.add(r.Place, `resource %s: the NUMA node of %s is unknown: offered as %s; with "unknownNuma": "all" they stay`,
			r.FullName(), plural(unknown, "device", "devices"), name)
	}
}

// pf reports what this node has no PF for.
func (f *findings) pf(i int) {
	want := &f.c.PFs[i]
	at := slices.IndexFunc(f.subjects, want.is)
	if at < 0 {
		if want.Name != "" {
			f.add(want.Place, "no PF %q on this node; PFs here: %s", want.Name, orNone(strings.Join(f.pfs(pfName), ", ")))
			return
		}
		f.add(want.Place, "no PF %s on this node; PFs here: %s", want.Address, orNone(strings.Join(f.pfs(rootDevice), ", ")))
		return
	}
	d := f.subjects[at]
	if want.NumVFs > d.TotalVFs {
		f.add(want.Place, "numVfs %d: %s can have at most %d", want.NumVFs, d.Address, d.TotalVFs)
	}
	if want.Whole && f.verdicts[at].resource < 0 {
		f.add(want.Place, `offerWhole: no resource takes %s: want one with "api": "dra" and a selector with pciAddresses`, d.Address)
	}
	for _, first := range f.c.PFs[:i] {
		if first.is(d) {
			f.add(want.Place, "%s is the PF of %s in line %d already, which counts", d.Address, first.Key, first.Line)
		}
	}
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
