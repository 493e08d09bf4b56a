// SPDX-License-Identifier: Apache-2.0

package main

// podDemand is how many pods request 1, 2, 4 and 8 VFs.
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

// fitsAll reports whether an optimal placement can admit all pods and keep each one's VFs and CPUs near one of the NUMA nodes, which have
// the same capacity. A kubelet cannot place more, because it never moves a running pod. If all fit, refusing a pod was avoidable by a
// kubelet that knew all later pods; otherwise it was unavoidable.
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
