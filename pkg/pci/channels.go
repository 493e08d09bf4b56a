// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"

	"github.com/safchain/ethtool"
)

// channels asks the kernel how many pairs of queues interfaces use, which sysfs does not tell.
type channels struct{ *ethtool.Ethtool }

func openChannels() (channels, error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return channels{}, fmt.Errorf("open socket for ethtool: %w", err)
	}
	return channels{e}, nil
}

// count is 0 when the kernel does not tell, or when the interface of that name here is another than in sysfs, which may be of another
// network namespace.
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

// pairs counts queues that send and receive; some drivers tell of both directions apart.
func pairs(n ethtool.Channels) int { return int(n.CombinedCount + min(n.RxCount, n.TxCount)) }
