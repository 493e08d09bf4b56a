// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"

	"github.com/safchain/ethtool"
)

// The type channels sends ethtool requests to read the number of queue pairs of an interface, because sysfs does not contain this number.
type channels struct{ *ethtool.Ethtool }

func openChannels() (channels, error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return channels{}, fmt.Errorf("open socket for ethtool: %w", err)
	}
	return channels{e}, nil
}

// countPairs returns the number of queue pairs of the interface of a PCI function. countPairs returns 0 if the kernel does not report the
// number. countPairs also returns 0 if the interface name belongs to another PCI function in the current network namespace.
func (c channels) countPairs(ifname string, a Address) int {
	if bus, err := c.BusInfo(ifname); err != nil || bus != a.String() {
		return 0
	}
	n, err := c.GetChannels(ifname)
	if err != nil {
		return 0
	}
	return queuePairs(n)
}

// queuePairs returns the number of pairs of send and receive queues. Some drivers report combined queues, and some report send and receive
// queues separately.
func queuePairs(n ethtool.Channels) int { return int(n.CombinedCount + min(n.RxCount, n.TxCount)) }
