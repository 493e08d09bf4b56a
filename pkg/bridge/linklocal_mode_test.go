// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestLinkLocalOfGuardedPod: a guarded pod gets the link-local address that its guard allows, also if its namespace would make another one
// (RFC 7217) or none. An unguarded pod keeps the mode of its namespace.
func TestLinkLocalOfGuardedPod(t *testing.T) {
	l := newLab(t, "name", "modes", "bridge", "btll", "antiSpoof", true)
	v := l.add("v")
	for what, mode := range map[string]string{"random": "sysctl -qw net.ipv6.conf.default.addr_gen_mode=3",
		"none": "sysctl -qw net.ipv6.conf.default.addr_gen_mode=1", "secret": "sysctl -qw net.ipv6.conf.default.stable_secret=fd00::1"} {
		for _, guarded := range []bool{true, false} {
			next := l.other()
			kerneltest.Must(t, next.Pod.Do(func() error { return v.run(mode) }))
			a := next.add(what, "antiSpoof", guarded)
			s, own := a.station(), false
			kerneltest.Must(t, a.Pod.Do(func() error {
				link, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}
				addresses, err := netlink.AddrList(link, netlink.FAMILY_V6)
				for _, address := range addresses {
					own = own || address.IP.Equal(s.linkLo.AsSlice())
				}
				return err
			}))
			if own != guarded {
				t.Errorf("%s, guarded %t: has the address of its MAC: %t", what, guarded, own)
			}
			a.OK(a.check("antiSpoof", guarded))
			a.OK(a.Call("DEL", what, "antiSpoof", guarded))
		}
	}
}
