// SPDX-License-Identifier: Apache-2.0

// Package kubelet is how the kubelet of Kubernetes 1.37 chooses the devices of a pod, written down again without Kubernetes: the hints of
// its device manager, what its Topology Manager makes of them, and which devices are taken then. It is as exact as the kubelet is; where
// that takes what comes first out of a map, the caller picks. Of the CPU manager there is the static policy for CPUs without hyperthreads.
//
// Left out: the options of policies (prefer-closest-numa-nodes and the like), sidecars, resources of pods as a whole, restarts of the
// kubelet.
package kubelet

import (
	"math/bits"
)

// Mask is a set of NUMA nodes, a bit each. The empty one stands for "any" in a hint, and for "unknown" at a device.
type Mask uint64

// Count returns how many nodes are in the set.
func (m Mask) Count() int { return bits.OnesCount64(uint64(m)) }

// Nodes returns the nodes of the set, sorted.
func (m Mask) Nodes() (nodes []int) {
	for rest := uint64(m); rest != 0; rest &= rest - 1 {
		nodes = append(nodes, bits.TrailingZeros64(rest))
	}
	return nodes
}

// narrower prefers fewer nodes, then lower numbers.
func (m Mask) narrower(than Mask) bool {
	if a, b := m.Count(), than.Count(); a != b {
		return a < b
	}
	return m < than
}

// subsets calls f with each set of nodes out of m, small ones first, of one size by the lowest node in which they differ.
func (m Mask) subsets(f func(Mask)) {
	var walk func(rest, chosen Mask, more int)
	walk = func(rest, chosen Mask, more int) {
		if more == 0 {
			f(chosen)
			return
		}
		for ; rest != 0; rest &= rest - 1 {
			walk(rest&(rest-1), chosen|rest&-rest, more-1)
		}
	}
	for size := 1; size <= m.Count(); size++ {
		walk(m, 0, size)
	}
}

// Hint says that a request could be served out of some NUMA nodes. Preferred is one of as few nodes as such a request ever needs here.
type Hint struct {
	Nodes     Mask
	Preferred bool
}

// Devices is a resource. Its devices go by number.
type Devices struct {
	Near    []Mask // where each is, as the plugin told
	Healthy []bool
	Used    []bool
	Machine Mask // the NUMA nodes there are
}

// NewDevices makes a resource of healthy, unused devices.
func NewDevices(machine Mask, near []Mask) *Devices {
	d := &Devices{Near: near, Healthy: make([]bool, len(near)), Used: make([]bool, len(near)), Machine: machine}
	for i := range d.Healthy {
		d.Healthy[i] = true
	}
	return d
}

// nodes returns those near which a device is.
func (d *Devices) nodes() Mask {
	var nodes Mask
	for _, near := range d.Near {
		nodes |= near
	}
	return nodes
}

// available returns the devices that can be had.
func (d *Devices) available() []int {
	var out []int
	for i := range d.Near {
		if d.Healthy[i] && !d.Used[i] {
			out = append(out, i)
		}
	}
	return out
}

// Hints returns those for n devices, some of which may be reused from init containers that are done. None at all, nil, is that the resource
// does not care; an empty list that it cannot be.
func (d *Devices) Hints(n int, reusable []int) []Hint {
	nodes := d.nodes()
	if nodes == 0 {
		return nil
	}
	hints, available := []Hint{}, d.available()
	if len(available)+len(reusable) < n {
		return hints
	}
	if nodes &= d.Machine; nodes == 0 {
		nodes = d.Machine
	}
	fewest := nodes.Count()
	nodes.subsets(func(mask Mask) {
		// Preferred is what would do if all devices were there and free.
		if near(mask, d.Near) >= n {
			fewest = min(fewest, mask.Count())
		}
		matching := 0
		for _, i := range reusable {
			switch {
			case d.Near[i]&mask != 0:
				matching++
			case d.Near[i] != 0:
				return
			}
		}
		for _, i := range available {
			if d.Near[i]&mask != 0 {
				matching++
			}
		}
		if matching >= n {
			hints = append(hints, Hint{Nodes: mask})
		}
	})
	for i := range hints {
		hints[i].Preferred = hints[i].Nodes.Count() == fewest
	}
	return hints
}

func near(mask Mask, devices []Mask) int {
	n := 0
	for _, d := range devices {
		if d&mask != 0 {
			n++
		}
	}
	return n
}
