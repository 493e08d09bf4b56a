// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestForgetNeighbour: ForgetNeighbour removes an entry with another MAC, unless it is an admin's permanent one.
func TestForgetNeighbour(t *testing.T) {
	w := newWire(t)
	now, old := mac("02:00:00:00:00:07"), mac("02:00:00:00:00:08")
	for _, c := range []struct {
		address, knows string
		state          int
		stays          bool
	}{
		{"10.9.0.7", "", 0, false},
		{"10.9.0.7", "old", netlink.NUD_REACHABLE, false},
		{"10.9.0.7", "old", netlink.NUD_PERMANENT, true},
		{"10.9.0.8", "now", netlink.NUD_REACHABLE, true},
		{"fd00:9::7", "old", netlink.NUD_STALE, false},
		{"fd00:9::8", "now", netlink.NUD_STALE, true},
	} {
		addr := netip.MustParseAddr(c.address)
		entry := &netlink.Neigh{LinkIndex: w.bridge.Index, IP: addr.AsSlice(), State: c.state, HardwareAddr: now}
		if c.knows == "old" {
			entry.HardwareAddr = old
		}
		if c.knows != "" {
			kerneltest.Must(t, netlink.NeighSet(entry))
		}
		kerneltest.Must(t, w.host.ForgetNeighbour(w.bridge, addr, now))
		list, err := netlink.NeighList(w.bridge.Index, 0)
		stays := false
		for _, e := range list {
			stays = stays || e.IP.Equal(entry.IP) && len(e.HardwareAddr) > 0 && e.State&netlink.NUD_FAILED == 0
		}
		if err != nil || stays != c.stays {
			t.Errorf("%+v: stays %t, %v, %v", c, stays, list, err)
		}
		_ = netlink.NeighDel(entry)
	}
	if err := w.host.ForgetNeighbour(Link{Index: 1 << 20}, netip.MustParseAddr("10.9.0.7"), now); err != nil {
		t.Errorf("without the link: %v", err)
	}
}
