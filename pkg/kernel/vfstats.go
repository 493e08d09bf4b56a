// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// VFStats is what a VF has received and sent since it was made, as its PF counts it (IFLA_VF_STATS).
type VFStats struct {
	RxBytes, TxBytes     uint64
	RxPackets, TxPackets uint64
	RxDropped, TxDropped uint64
}

// VFStatsOf returns the counters of all VFs of a PF in this network namespace, by index. It works for VFs in any namespace, and with any driver.
func VFStatsOf(pf string) (map[int]VFStats, error) {
	link, err := netlink.LinkByName(pf)
	if err != nil {
		return nil, fmt.Errorf("link get %s: %w", pf, err)
	}
	stats := map[int]VFStats{}
	for _, v := range link.Attrs().Vfs {
		stats[v.ID] = VFStats{v.RxBytes, v.TxBytes, v.RxPackets, v.TxPackets, v.RxDropped, v.TxDropped}
	}
	return stats, nil
}
