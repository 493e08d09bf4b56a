// SPDX-License-Identifier: Apache-2.0

package main

// demand counts pods by the VFs they have: 1, 2, 4, 8.
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

// fits reports whether these pods could all run, each with its VFs (and the CPUs for these) near one of so many equal NUMA nodes, if they
// were placed again. That is more than any kubelet can do, which moves no pod: a refusal of pods that fit here could have been avoided by
// who knew all that was to come, at best; of pods that do not fit here it could not.
//
// It is exact: the largest go first, and as each size is a multiple of the next smaller one, it makes no difference to the room for those
// where a larger one is put.
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
