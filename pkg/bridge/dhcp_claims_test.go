// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// dhcpRequest is a UDP datagram from a DHCP client's port with a DISCOVER (RFC 2131) for a MAC. relay is 0.0.0.0 unless it was relayed.
func dhcpRequest(mac net.HardwareAddr, relay netip.Addr) []byte {
	message := slices.Concat([]byte{1, 1, 6, 0}, make([]byte, 20), relay.AsSlice(), mac, make([]byte, 10+64+128),
		[]byte{99, 130, 83, 99, 53, 1, 1, 255})
	return slices.Concat(be(dhcpClient), be(dhcpServer), be(uint16(8+len(message))), be(0), message)
}

// TestDHCPClientMACs (S-20): a guarded pod names no other MAC than its own to a DHCP server, which enters it into its neighbour table
// before it answers (dnsmasq). Relayed requests pass, because their answers go to the relay.
func TestDHCPClientMACs(t *testing.T) {
	l := newLab(t, "name", "dhcp", "bridge", "btdhcp", "antiSpoof", true, "isGateway", false, "ipMasq", false)
	l.setBridged("0") // the IP families' rules would reassemble fragments
	guarded, other, v := l.add("guarded"), l.other().add("other", "antiSpoof", false), l.other().add("v")
	none := netip.IPv4Unspecified()
	for _, sender := range []attached{guarded, other} {
		p := pair{sender.station(), v.station()}
		from := func(src netip.Addr, flags uint16, body []byte) []byte {
			return ip4(p.v.mac, p.m.mac, src, p.v.v4, unix.IPPROTO_UDP, flags, nil, body)
		}
		frames := []frame{
			{"client without an address", always, from(none, 0, dhcpRequest(p.m.mac, none))},
			{"client with an address", always, from(p.m.v4, 0, dhcpRequest(p.m.mac, none))},
			{"relay", always, from(p.m.v4, 0, dhcpRequest(p.v.mac, p.m.v4))},
			{"another MAC without an address", forgery, from(none, 0, dhcpRequest(p.v.mac, none))},
			{"another MAC with an address", forgery, from(p.m.v4, 0, dhcpRequest(p.v.mac, none))},
			{"half a MAC", forgery, from(p.m.v4, 0, withByte(dhcpRequest(p.m.mac, none), 10, 3))},
			{"first fragment without the MAC", forgery, from(p.m.v4, moreFragments, dhcpRequest(p.v.mac, none)[:32])},
		}
		sender.checkArrivals(v, frames...)
	}
}
