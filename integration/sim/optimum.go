// SPDX-License-Identifier: Apache-2.0

package main

// demand counts pods by their number of VFs: 1, 2, 4, 8.
type demand [4]int

func (d *demand) add(vfs, n int) {
	for i := range d {
		if 1<<i == vfs {
			d[i] += n
		}
	}
}

func (d demand) with(vfs int) demand {
	d.add(vfs, 1)
	return d
}

// fits reports whether these pods could all run if they were placed again, each with its VFs (and their CPUs) near one of the given
// number of equal NUMA nodes. No kubelet can do more, because a kubelet moves no pods. A refusal of pods that fit could at best have
// been avoided with knowledge of all later pods. A refusal of pods that do not fit could not have been avoided.
//
// The result is exact. The largest pods are placed first. Each size is a multiple of the next smaller one, so the place of a larger
// pod does not change the room for smaller ones.
func (d demand) fits(nodes, capacity int) bool {
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
