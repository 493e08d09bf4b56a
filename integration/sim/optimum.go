// SPDX-License-Identifier: Apache-2.0

package main

// podDemand contains the numbers of pods with 1, 2, 4 and 8 VFs.
type podDemand [4]int

func (d *podDemand) add(vfs, n int) {
	for i := range d {
		if 1<<i == vfs {
			d[i] += n
		}
	}
}

func (d podDemand) with(vfs int) podDemand {
	d.add(vfs, 1)
	return d
}

// fitsAll reports whether an optimal placement can admit all pods and keep the VFs and CPUs of each pod near one NUMA node. All NUMA nodes
// have the same capacity. A kubelet cannot place more pods, because it never moves a running pod. If all pods fit, a kubelet with knowledge
// of the later pods could have avoided the refusal. If the pods do not fit, no kubelet could have avoided the refusal.
//
// The result is exact. The largest pods are placed first. Each size is a multiple of the next smaller size, so the choice of the node for a
// larger pod does not change the total room for smaller pods.
func (d podDemand) fitsAll(nodes, capacity int) bool {
	left := make([]int, nodes)
	for i := range left {
		left[i] = capacity
	}
	for i := len(d) - 1; i >= 0; i-- {
		pods := d[i]
		for n := range left {
			put := min(pods, left[n]>>i)
			left[n] -= put << i
			pods -= put
		}
		if pods > 0 {
			return false
		}
	}
	return true
}
