// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"fmt"
	"slices"
)

// Prefer is a plugin's answer to GetPreferredAllocation: n of the available devices, including the required ones.
type Prefer func(available, must []int, n int) []int

// Pick takes n devices where the kubelet has no preference.
type Pick func(from []int, n int) []int

// Choose takes n devices near a hint and marks them as used. If prefer is nil, the plugin has no preference. In some cases the kubelet
// does not ask the plugin.
func (d *Devices) Choose(h Hint, n int, reusable []int, prefer Prefer, pick Pick) ([]int, error) {
	if !slices.Contains(d.Healthy, true) {
		return nil, fmt.Errorf("no healthy device")
	}
	c := choice{need: n, pick: pick}
	if c.take(reusable) {
		return c.done(d)
	}
	available := d.available()
	if len(available) < c.need {
		return nil, fmt.Errorf("%d more devices wanted, %d available", c.need, len(available))
	}
	aligned, unaligned, unknown := d.byAffinity(h, available)
	ask := func(from []int) []int {
		if prefer == nil {
			return nil
		}
		all := slices.Concat(from, c.taken)
		slices.Sort(all)
		answer := prefer(slices.Compact(all), slices.Clone(c.taken), n)
		return slices.DeleteFunc(slices.Clone(from), func(i int) bool { return !slices.Contains(answer, i) })
	}
	if c.need < len(aligned) {
		if !c.take(ask(aligned)) {
			c.take(aligned)
		}
		return c.done(d)
	}
	if c.take(aligned) {
		return c.done(d)
	}
	if !c.take(ask(available)) && !c.take(unaligned) {
		c.take(unknown)
	}
	return c.done(d)
}

// byAffinity splits devices into devices near a node of the hint, near other nodes, and with an unknown node.
func (d *Devices) byAffinity(h Hint, available []int) (aligned, unaligned, unknown []int) {
	if h.Nodes == 0 || d.nodes() == 0 {
		return nil, nil, available
	}
	for _, i := range available {
		switch {
		case d.Near[i]&h.Nodes != 0:
			aligned = append(aligned, i)
		case d.Near[i] != 0:
			unaligned = append(unaligned, i)
		default:
			unknown = append(unknown, i)
		}
	}
	return aligned, unaligned, unknown
}

type choice struct {
	need  int
	taken []int
	pick  Pick
}

// take takes devices until the need is met or none remain, and reports whether the need is met.
func (c *choice) take(from []int) bool {
	from = slices.DeleteFunc(slices.Clone(from), func(i int) bool { return slices.Contains(c.taken, i) })
	if len(from) > c.need {
		from = c.pick(from, c.need)
	}
	c.taken = append(c.taken, from...)
	c.need -= len(from)
	return c.need == 0
}

func (c *choice) done(d *Devices) ([]int, error) {
	if c.need != 0 {
		return nil, fmt.Errorf("%d devices too few", c.need)
	}
	slices.Sort(c.taken)
	for _, i := range c.taken {
		d.Used[i] = true
	}
	return c.taken, nil
}

// Release marks devices as free.
func (d *Devices) Release(devices []int) {
	for _, i := range devices {
		d.Used[i] = false
	}
}
