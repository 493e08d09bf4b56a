// SPDX-License-Identifier: Apache-2.0

package ports

import "slices"

// Index finds overlapping ports without comparing all pairs of ports.
type Index struct {
	singles map[uint16][]namedPort
	ranges  []namedPort
}

// namedPort is a port and the name under which it was added.
type namedPort struct {
	Port
	name string
}

// Add adds ports to the index under a name.
func (x *Index) Add(name string, list ...Port) {
	for _, p := range list {
		if p.Last != 0 {
			x.ranges = append(x.ranges, namedPort{p, name})
			continue
		}
		if x.singles == nil {
			x.singles = map[uint16][]namedPort{}
		}
		x.singles[p.Port] = append(x.singles[p.Port], namedPort{p, name})
	}
}

// Overlap reports whether a port overlaps one in the index that was not added under the name except.
func (x *Index) Overlap(p Port, except string) bool {
	clash := func(o namedPort) bool { return o.name != except && p.Overlaps(o.Port) }
	for port := int(p.Port); port <= int(p.End()) && len(x.singles) > 0; port++ {
		if slices.ContainsFunc(x.singles[uint16(port)], clash) {
			return true
		}
	}
	return slices.ContainsFunc(x.ranges, clash)
}

// Covers reports whether a single entry of the index contains all port numbers of p.
func (x *Index) Covers(p Port) bool {
	if p.Last == 0 {
		return x.Overlap(p, "")
	}
	return slices.ContainsFunc(x.ranges, func(o namedPort) bool { return p.Overlaps(o.Port) && o.Port.Port <= p.Port && o.Last >= p.Last })
}
