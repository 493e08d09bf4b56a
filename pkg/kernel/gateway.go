// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net/netip"
)

// ValidGateway returns an error with the reason if an address cannot be the gateway of a subnet. It may be outside the subnet.
func ValidGateway(subnet netip.Prefix, gw netip.Addr) error {
	is := ""
	switch {
	case gw.IsUnspecified():
		is = "the unspecified address"
	case gw.IsLoopback():
		is = "a loopback address"
	case gw.IsMulticast():
		is = "a multicast address"
	case gw == netip.AddrFrom4([4]byte{255, 255, 255, 255}), gw.Is4() && subnet.Bits() < 31 && subnet.Contains(gw) &&
		!subnet.Contains(gw.Next()):
		is = "a broadcast address"
	default:
		return nil
	}
	return fmt.Errorf("%s, no gateway can have it", is)
}
