// SPDX-License-Identifier: Apache-2.0

package kubeletnode

import (
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// Prefer emulates GetPreferredAllocation of a device plugin. It returns n available devices, including all of must.
type Prefer func(available, must []int, n int) []int

// Pick returns n of the devices, in place of the kubelet's arbitrary choice between equally good ones.
type Pick func(from []int, n int) []int

// choose marks n devices near the NUMA nodes of a hint as in use. Like the kubelet, it calls prefer only if there are several choices; nil
// stands for a plugin without GetPreferredAllocation.
func choose(d *kubelet.Devices, h kubelet.Hint, n int, reusable []int, prefer Prefer, pick Pick) ([]int, error) {
	if !slices.Contains(d.Healthy, true) {
		return nil, fmt.Errorf("no healthy device")
	}
	c := choice{need: n, pick: pick}
	if c.addDevices(reusable) {
		return c.done(d)
	}
	available := availableDevices(d)
	if len(available) < c.need {
		return nil, fmt.Errorf("%d more devices wanted, %d available", c.need, len(available))
	}
	aligned, unaligned, unknown := byAffinity(d, h, available)
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
		if !c.addDevices(ask(aligned)) {
			c.addDevices(aligned)
		}
		return c.done(d)
	}
	if c.addDevices(aligned) {
		return c.done(d)
	}
	if !c.addDevices(ask(available)) && !c.addDevices(unaligned) {
		c.addDevices(unknown)
	}
	return c.done(d)
}

// byAffinity splits devices into those near a NUMA node of the hint, those near others, and those of unknown nodes.
func byAffinity(d *kubelet.Devices, h kubelet.Hint, available []int) (aligned, unaligned, unknown []int) {
	if h.Nodes == 0 || !slices.ContainsFunc(d.Near, func(m kubelet.Mask) bool { return m != 0 }) {
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

// addDevices adds devices of a list to the choice, and reports whether it is complete.
func (c *choice) addDevices(from []int) bool {
	from = slices.DeleteFunc(slices.Clone(from), func(i int) bool { return slices.Contains(c.taken, i) })
	if len(from) > c.need {
		from = c.pick(from, c.need)
	}
	c.taken = append(c.taken, from...)
	c.need -= len(from)
	return c.need == 0
}

func (c *choice) done(d *kubelet.Devices) ([]int, error) {
	if c.need != 0 {
		return nil, fmt.Errorf("%d devices too few", c.need)
	}
	slices.Sort(c.taken)
	for _, i := range c.taken {
		d.Used[i] = true
	}
	return c.taken, nil
}

// release makes devices free again.
func release(d *kubelet.Devices, devices []int) {
	for _, i := range devices {
		d.Used[i] = false
	}
}

// availableDevices returns the healthy devices that are not in use.
func availableDevices(d *kubelet.Devices) (available []int) {
	for i := range d.Near {
		if d.Healthy[i] && !d.Used[i] {
			available = append(available, i)
		}
	}
	return available
}
