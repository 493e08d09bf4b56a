// SPDX-License-Identifier: Apache-2.0

package main

// The type podDemand contains how many pods request 1, 2, 4 and 8 VFs.
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
// have the same capacity. A real kubelet cannot place more pods than an optimal placement, because the kubelet never moves a running pod.
// If all pods fit, the refusal of a pod was avoidable: a kubelet that knew all later pods could have admitted all pods. If the pods do not
// fit, the refusal was unavoidable.
//
// The result of fitsAll is exact, although fitsAll tries only one order of the pods. fitsAll places the largest pods first. Each pod size
// is a multiple of the next smaller size. The choice of the NUMA node for a larger pod therefore does not change the number of smaller pods
// that fit.
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
