// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/kernel"
)

// TunnelName is the name of the tunnel device.
const TunnelName = "podlace.vx"

// hops4 is the number of IPv4 next hops in the tunnel, 169.254.1.0 to 169.254.254.255; RFC 3927 reserves the first and last 256 addresses
// of 169.254.0.0/16.
const hops4 = 254 << 8

// overhead returns the bytes that VXLAN adds to a packet: 22 for the Ethernet and VXLAN headers, 8 for UDP, and 20 or 40 for the outer IP
// header.
func overhead(underlay netip.Addr) int {
	if underlay.Is4() {
		return 50
	}
	return 70
}

// tunnelMAC returns the MAC of a node's tunnel device. It is computed from the node's IP address, so nodes need not publish it.
func tunnelMAC(a netip.Addr) (mac [6]byte) {
	if a.Is4() {
		four := a.As4()
		copy(mac[:], append([]byte{0x0e, 0x50}, four[:]...))
		return mac
	}
	six := a.As16()
	sum := sha256.Sum256(six[:])
	mac[0] = 0x0e
	copy(mac[1:], sum[:])
	return mac
}

// tunneler collects the peers that this node reaches through the tunnel.
type tunneler struct {
	own   netip.Addr
	macs  map[[6]byte]netip.Addr // the node of each MAC
	hops  map[uint32]bool        // used IPv4 next hops
	peers []kernel.TunnelPeer
	index map[netip.Addr]int // index in peers of each address
}

func newTunneler(self Self) *tunneler {
	own := self.Underlay()
	return &tunneler{own: own, macs: map[[6]byte]netip.Addr{tunnelMAC(own): own}, hops: map[uint32]bool{}, index: map[netip.Addr]int{}}
}

// addPeer adds a peer and returns the next hop of the route to its podCIDR, or the reason why it cannot use the tunnel.
func (t *tunneler) addPeer(peer Peer) (hop netip.Addr, reason string) {
	remote := peer.Underlay
	if !remote.IsValid() || remote.Is4() != t.own.Is4() {
		family := map[bool]string{true: "IPv4", false: "IPv6"}[t.own.Is4()]
		return hop, fmt.Sprintf("the node object has no %s address, which is the family of the tunnel; addressCIDRs can choose another", family)
	}
	mac := tunnelMAC(remote)
	if other, ok := t.macs[mac]; ok && other != remote {
		return hop, fmt.Sprintf("its address %s gives the same MAC in the tunnel as %s", remote, other)
	}
	t.macs[mac] = remote
	if hop = nextHop6(mac); peer.PodCIDR.Addr().Is4() {
		if len(t.hops) == hops4 {
			return hop, fmt.Sprintf("the tunnel already has its maximum of %d next hops", hops4)
		}
		hop = t.nextHop4(peer.Name)
	}
	i, ok := t.index[remote]
	if !ok {
		i = len(t.peers)
		t.index[remote] = i
		t.peers = append(t.peers, kernel.TunnelPeer{MAC: mac[:], Remote: remote})
	}
	t.peers[i].Hops = append(t.peers[i].Hops, hop)
	return hop, ""
}

func (t *tunneler) nextHop4(name string) netip.Addr {
	n := hash(name, true) % hops4
	for t.hops[n] {
		n = (n + 1) % hops4
	}
	t.hops[n] = true
	return netip.AddrFrom4([4]byte{169, 254, byte(1 + n>>8), byte(n)})
}

// nextHop6 returns the IPv6 next hop of a peer: a link-local address with the peer's MAC, which is unique.
func nextHop6(mac [6]byte) netip.Addr {
	hop := [16]byte{0: 0xfe, 1: 0x80}
	copy(hop[10:], mac[:])
	return netip.AddrFrom16(hop)
}

// device returns the tunnel device that this node should have. uplink is the MTU of the link below, or 0 if unknown. The device gets the
// first address of each own podCIDR, which pods never get.
func (t *tunneler) device(cfg Config, podCIDRs []netip.Prefix, uplink int) *Tunnel {
	var addresses []netip.Addr
	for _, p := range podCIDRs {
		addresses = append(addresses, p.Masked().Addr())
	}
	mac := tunnelMAC(t.own)
	slices.SortFunc(t.peers, func(a, b kernel.TunnelPeer) int { return a.Remote.Compare(b.Remote) })
	vxlan := kernel.VXLAN{Name: TunnelName, VNI: cfg.VXLAN.VNI, Port: cfg.VXLAN.Port, Local: t.own, MAC: net.HardwareAddr(mac[:]),
		MTU: max(0, min(uplink, maxMTU)-overhead(t.own))}
	return &Tunnel{VXLAN: vxlan, Addresses: addresses, Peers: t.peers}
}
