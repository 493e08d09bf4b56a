// SPDX-License-Identifier: Apache-2.0

package kubeletnode

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// CPUs is a resource that consists of whole CPUs. Each CPU is a separate core of one NUMA node.
type CPUs struct{ kubelet.Devices }

// NewCPUs returns the CPUs of a machine with the given number of CPUs on each NUMA node.
func NewCPUs(machine kubelet.Mask, each int) *CPUs {
	var near []kubelet.Mask
	for rest := machine; rest != 0; rest &= rest - 1 {
		near = append(near, slices.Repeat([]kubelet.Mask{rest & -rest}, each)...)
	}
	return &CPUs{*kubelet.NewDevices(machine, near)}
}

// Take allocates n CPUs and prefers CPUs near the NUMA nodes of the hint.
func (c *CPUs) Take(h kubelet.Hint, n int) ([]int, error) {
	available := availableDevices(&c.Devices)
	if len(available) < n {
		return nil, fmt.Errorf("%d CPUs wanted, %d available", n, len(available))
	}
	var chosen []int
	if h.Nodes != 0 {
		aligned, _, _ := byAffinity(&c.Devices, h, available)
		chosen = c.selectCPUs(aligned, min(n, len(aligned)))
	}
	rest := slices.DeleteFunc(available, func(i int) bool { return slices.Contains(chosen, i) })
	chosen = append(chosen, c.selectCPUs(rest, n-len(chosen))...)
	slices.Sort(chosen)
	for _, i := range chosen {
		c.Used[i] = true
	}
	return chosen, nil
}

// selectCPUs selects n CPUs: whole NUMA nodes that are free, as long as the request needs all of their CPUs, and the rest from the others,
// beginning with the one that has the fewest free CPUs.
func (c *CPUs) selectCPUs(from []int, n int) []int {
	byNode := map[kubelet.Mask][]int{}
	for _, i := range from {
		byNode[c.Near[i]] = append(byNode[c.Near[i]], i)
	}
	var nodes []kubelet.Mask
	for rest := c.Machine; rest != 0; rest &= rest - 1 {
		nodes = append(nodes, rest&-rest)
	}
	slices.SortStableFunc(nodes, func(a, b kubelet.Mask) int { return cmp.Compare(len(byNode[a]), len(byNode[b])) })
	var out []int
	for _, node := range nodes {
		all := 0
		for _, near := range c.Near {
			if near == node {
				all++
			}
		}
		if len(byNode[node]) == all && n-len(out) >= all {
			out = append(out, byNode[node]...)
			byNode[node] = nil
		}
	}
	for _, node := range nodes {
		out = append(out, byNode[node][:min(len(byNode[node]), n-len(out))]...)
	}
	return out
}
