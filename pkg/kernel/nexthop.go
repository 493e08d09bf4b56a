// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"net"
	"net/netip"
)

// Nexthop is a nexthop object (ip-nexthop(8)): routes refer to it by its ID, so that one request changes the gateway of all of them.
type Nexthop struct {
	ID      uint32
	Gateway netip.Addr // either family, also for routes of the other
	Link    int        // ifindex
	OnLink  bool       // the gateway is on the link although no route says so
}

// ProtocolRoute is a route in the main table that refers to a nexthop object.
type ProtocolRoute struct {
	Dst     netip.Prefix
	Nexthop uint32 // 0: the destination is unreachable
	Metric  int    // 0: the kernel's default, which is 0 for IPv4 and 1024 for IPv6
}

// VXLAN is a VXLAN device (ip-link(8)) that learns nothing.
type VXLAN struct {
	Name  string
	VNI   int
	Port  int // UDP
	Local netip.Addr
	MAC   net.HardwareAddr
	MTU   int
}

// TunnelPeer is a node at the other end of a VXLAN device: frames to MAC go to the node Remote, and the gateways Hops have MAC.
type TunnelPeer struct {
	MAC    net.HardwareAddr
	Remote netip.Addr
	Hops   []netip.Addr
}
