// SPDX-License-Identifier: Apache-2.0

package kubeletnode

import (
	"strings"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// ParseDevices creates a resource from one word for each device: its NUMA nodes, or "-" if unknown, followed by "!" if it is unhealthy and
// "x" if it is in use.
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
