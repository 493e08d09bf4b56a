// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestReservedDestinations (S-20, S-22): a bridge normally learns the source MAC of frames to 01:80:c2:00:00:00 to 0f (IEEE 802.1Q, table
// 8-1) and passes them to the node before any rule sees them. On a guarded port it must not learn the MAC, and the node must ignore ARP
// packets in such frames.
func TestReservedDestinations(t *testing.T) {
	for _, key := range []string{"macspoofchk", "antiSpoof"} {
		t.Run(key, func(t *testing.T) {
			l := newLab(t, "name", "reserved", "bridge", "btrd", key, true)
			m, v := l.add("m"), l.other().add("v")
			from, to := m.station(), v.station()
			forged, gateway := netip.MustParseAddr("10.60.0.99"), netip.MustParseAddr("10.60.0.1")
			stolen := net.HardwareAddr{2, 0, 0x5e, 0, 0x53, 1}
			var frames [][]byte
			for last := range byte(16) {
				reserved := net.HardwareAddr{1, 0x80, 0xc2, 0, 0, last}
				frames = append(frames, udp4(reserved, stolen, from.v4, to.v4, 1000, 2000, "theft"),
					arpFrame(reserved, from.mac, 1, from.mac, forged, gateway),
					ether(reserved, stolen, 0x88cc, []byte("neighbour")))
			}
			for i, arrived := range arrivals(m, v, append(frames, udp4(to.mac, from.mac, from.v4, to.v4, 1, 2, "end"))) {
				if arrived && i < len(frames) && (i/3 > 0 || key == "antiSpoof") { // spanning tree may pass with macspoofchk
					t.Errorf("the frame to 01:80:c2:00:00:%02x reached the neighbour: %x", i/3, frames[i])
				}
			}
			bridge, err := netlink.LinkByName("btrd")
			if err != nil {
				t.Fatal(err)
			}
			learnt, err := netlink.NeighList(0, unix.AF_BRIDGE)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range learnt {
				if bytes.Equal(n.HardwareAddr, stolen) {
					t.Errorf("the bridge learnt %s at the port with the index %d", n.HardwareAddr, n.LinkIndex)
				}
			}
			believed, err := netlink.NeighList(0, netlink.FAMILY_V4)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range believed {
				// macspoofchk does not check IP addresses, so the bridge may have a neighbour entry with the forged one.
				if n.IP.String() == forged.String() && (n.LinkIndex != bridge.Attrs().Index || key == "antiSpoof") {
					t.Errorf("the node believes that %s is at %s", n.IP, n.HardwareAddr)
				}
			}
			l.OK(m.check())
		})
	}
}
