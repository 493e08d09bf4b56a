// SPDX-License-Identifier: Apache-2.0

package kubeletnode

import (
	"strings"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// ParseDevices creates a resource from a text with one word for each device. Each word contains the NUMA nodes of the device, or "-" if the
// NUMA nodes are unknown. A word ends with "!" if the device is unhealthy, and with "x" if the device is in use.
func ParseDevices(machine kubelet.Mask, words string) *kubelet.Devices {
	d := kubelet.NewDevices(machine, make([]kubelet.Mask, len(strings.Fields(words))))
	for i, word := range strings.Fields(words) {
		for _, c := range word {
			switch c {
			case '!':
				d.Healthy[i] = false
			case 'x':
				d.Used[i] = true
			case '-':
			default:
				d.Near[i] |= 1 << (c - '0')
			}
		}
	}
	return d
}
