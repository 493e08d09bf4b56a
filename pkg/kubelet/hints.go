// SPDX-License-Identifier: Apache-2.0

// Package kubelet reimplements how the kubelet of Kubernetes 1.37 chooses the devices of a pod. It contains no code of Kubernetes. It
// covers the hints of the device manager, the decision of the Topology Manager, and the choice of devices. It also covers the CPU manager's
// static policy for CPUs without hyperthreads. The results are the same as the kubelet's results, except for arbitrary choices. Where the
// kubelet chooses devices in the random order of a Go map, the caller of this package chooses them with a function of type Pick.
//
// The package does not support policy options (such as prefer-closest-numa-nodes), sidecars, pod-level resources, or restarts of the
// kubelet.
package kubelet

import (
	"math/bits"
)

// Mask is a set of NUMA nodes with one bit for each node. The empty set means "any node" in a hint and "unknown node" for a device.
type Mask uint64

// Count returns the number of nodes in the set.
func (m Mask) Count() int { return bits.OnesCount64(uint64(m)) }

// Nodes returns the nodes of the set, sorted.
func (m Mask) Nodes() (nodes []int) {
	for rest := uint64(m); rest != 0; rest &= rest - 1 {
		nodes = append(nodes, bits.TrailingZeros64(rest))
	}
	return nodes
}

// isNarrower reports whether the set comes before another set in the kubelet's order. The kubelet orders sets by their number of nodes. It
// orders sets of equal size by the numeric value of the mask.
func (m Mask) isNarrower(than Mask) bool {
	if a, b := m.Count(), than.Count(); a != b {
		return a < b
	}
	return m < than
}

// forEachSubset calls f with each non-empty subset of m, ordered by size. Subsets of one size are ordered by the lowest node in which they
// differ.
func (m Mask) forEachSubset(f func(Mask)) {
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

// Hint is a set of NUMA nodes whose devices can serve a request. A hint is preferred if no smaller set of nodes of this machine could ever
// serve the request.
type Hint struct {
	Nodes     Mask
	Preferred bool
}

// Devices is a resource. Its devices are identified by their index.
type Devices struct {
	Near    []Mask // NUMA nodes of each device, as the plugin reported
	Healthy []bool
	Used    []bool
	Machine Mask // NUMA nodes of the machine
}

// NewDevices returns a resource whose devices are all healthy and unused.
func NewDevices(machine Mask, near []Mask) *Devices {
	d := &Devices{Near: near, Healthy: make([]bool, len(near)), Used: make([]bool, len(near)), Machine: machine}
	for i := range d.Healthy {
		d.Healthy[i] = true
	}
	return d
}

// allNodes returns the NUMA nodes of all devices of the resource.
func (d *Devices) allNodes() Mask {
	var nodes Mask
	for _, near := range d.Near {
		nodes |= near
	}
	return nodes
}

// availableDevices returns the healthy devices that are not in use.
func (d *Devices) availableDevices() []int {
	var out []int
	for i := range d.Near {
		if d.Healthy[i] && !d.Used[i] {
			out = append(out, i)
		}
	}
	return out
}

// Hints returns the hints for a request of n devices. The last argument contains the devices of the pod's init containers, because the
// request may use these devices again. A nil result means that the resource has no preference. An empty list means that the resource cannot
// serve the request.
func (d *Devices) Hints(n int, reusable []int) []Hint {
	nodes := d.allNodes()
	if nodes == 0 {
		return nil
	}
	hints, available := []Hint{}, d.availableDevices()
	if len(available)+len(reusable) < n {
		return hints
	}
	if nodes &= d.Machine; nodes == 0 {
		nodes = d.Machine
	}
	fewest := nodes.Count()
	nodes.forEachSubset(func(mask Mask) {
		// A hint is preferred if it has as few nodes as the request would need with all devices free.
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
