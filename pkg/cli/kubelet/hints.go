// SPDX-License-Identifier: Apache-2.0

// Package kubelet reimplements two steps of the kubelet of Kubernetes 1.37, without its code: the topology hints for a request, and the
// decision of the Topology Manager. It does not know policy options (such as prefer-closest-numa-nodes), sidecars, pod-level resources, or
// restarts of the kubelet.
package kubelet

import (
	"encoding/json"
	"fmt"
	"math/bits"
	"strings"
)

// Mask is a set of NUMA nodes, one bit each. The empty set means "any node" in a hint, and "unknown node" for a device.
type Mask uint64

// Count returns the number of NUMA nodes in the set.
func (m Mask) Count() int { return bits.OnesCount64(uint64(m)) }

// Nodes returns the NUMA nodes of the set in ascending order.
func (m Mask) Nodes() (nodes []int) {
	for rest := uint64(m); rest != 0; rest &= rest - 1 {
		nodes = append(nodes, bits.TrailingZeros64(rest))
	}
	return nodes
}

// MarshalJSON returns the list of the NUMA nodes.
func (m Mask) MarshalJSON() ([]byte, error) { return json.Marshal(m.Nodes()) }

// isNarrower reports whether the set comes first in the kubelet's order: by size, then by the numeric value of the masks.
func (m Mask) isNarrower(than Mask) bool {
	if a, b := m.Count(), than.Count(); a != b {
		return a < b
	}
	return m < than
}

// forEachSubset calls f with each non-empty subset of m, sorted by size, then by the lowest NUMA node in which they differ.
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

// Hint is a set of NUMA nodes whose devices can serve a request. It is preferred if no smaller set could, even if all devices were free.
type Hint struct {
	Nodes     Mask `json:"nodes"`
	Preferred bool `json:"preferred"`
}

// String formats a hint as {0,1}*, with a star if it is preferred, or as "any".
func (h Hint) String() string {
	if h.Nodes == 0 {
		return "any"
	}
	text := strings.Join(strings.Fields(fmt.Sprint(h.Nodes.Nodes())), ",")
	text = "{" + strings.Trim(text, "[]") + "}"
	if h.Preferred {
		text += "*"
	}
	return text
}

// Devices holds the devices of one resource. A device's index in the fields is its ID.
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

// Hints returns the hints for a request of n devices; reusable are those of the pod's init containers, which it may use again. It returns
// nil, which means no preference, if no device has a known NUMA node, and an empty list if the request cannot be served.
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
		// A preferred hint has the fewest NUMA nodes that could serve the request if all devices were free.
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
