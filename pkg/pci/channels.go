// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"

	"github.com/safchain/ethtool"
)

// channels reads the number of queue pairs of interfaces by ethtool, because sysfs does not have it.
type channels struct{ *ethtool.Ethtool }

func openChannels() (channels, error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return channels{}, fmt.Errorf("open socket for ethtool: %w", err)
	}
	return channels{e}, nil
}

// count returns 0 if the kernel does not report a number, or if the interface of that name in this network namespace is not the one in
// sysfs.
func (c channels) count(ifname string, a Address) int {
	if bus, err := c.BusInfo(ifname); err != nil || bus != a.String() {
		return 0
	}
	n, err := c.GetChannels(ifname)
	if err != nil {
		return 0
	}
	return pairs(n)
}

// pairs counts the pairs of send and receive queues; some drivers report the directions separately.
func pairs(n ethtool.Channels) int { return int(n.CombinedCount + min(n.RxCount, n.TxCount)) }
