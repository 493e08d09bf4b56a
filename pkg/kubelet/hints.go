// SPDX-License-Identifier: Apache-2.0

// Package kubelet reimplements, without Kubernetes' code, how the kubelet of Kubernetes 1.37 chooses the devices of a pod: the hints
// of its device manager, the decision of its Topology Manager, and the choice of devices. It is exact, except that the caller picks
// where the kubelet takes the first elements of a map. Of the CPU manager it has the static policy for CPUs without hyperthreads.
//
// It omits the options of policies (such as prefer-closest-numa-nodes), sidecars, pod-level resources, and restarts of the kubelet.
package kubelet

import (
	"math/bits"
)

// Mask is a set of NUMA nodes, one bit each. The empty set means "any" in a hint, and "unknown" for a device.
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

// narrower orders sets with fewer nodes first, then sets with lower numbers.
func (m Mask) narrower(than Mask) bool {
	if a, b := m.Count(), than.Count(); a != b {
		return a < b
	}
	return m < than
}

// subsets calls f with each subset of the nodes in m, small ones first. Subsets of one size are ordered by the lowest node in which
// they differ.
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

// Hint says that some NUMA nodes can serve a request. It is preferred if no smaller set of nodes of this machine could ever serve the
// request.
type Hint struct {
	Nodes     Mask
	Preferred bool
}

// Devices is a resource whose devices are numbered.
type Devices struct {
	Near    []Mask // NUMA nodes of each device, as the plugin reported
	Healthy []bool
	Used    []bool
	Machine Mask // NUMA nodes of the machine
}

// NewDevices returns a resource of healthy, unused devices.
func NewDevices(machine Mask, near []Mask) *Devices {
	d := &Devices{Near: near, Healthy: make([]bool, len(near)), Used: make([]bool, len(near)), Machine: machine}
	for i := range d.Healthy {
		d.Healthy[i] = true
	}
	return d
}

// nodes returns the NUMA nodes of a device.
func (d *Devices) nodes() Mask {
	var nodes Mask
	for _, near := range d.Near {
		nodes |= near
	}
	return nodes
}

// available returns the devices that can be allocated.
func (d *Devices) available() []int {
	var out []int
	for i := range d.Near {
		if d.Healthy[i] && !d.Used[i] {
			out = append(out, i)
		}
	}
	return out
}

// Hints returns the hints for n devices. Reusable devices come from finished init containers. nil means that the resource has no
// preference, an empty list that the request cannot be served.
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
		// A hint is preferred if it has as few nodes as would suffice if all devices were free.
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
