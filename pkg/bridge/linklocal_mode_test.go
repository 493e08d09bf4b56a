// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
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

// TestPortWithoutAddressesIsSilent: a port without addresses sends nothing by itself, so the neighbours do not learn a fixed MAC, such as
// that of a virtual machine that still runs elsewhere. Another plugin may enable IPv6 later.
func TestPortWithoutAddressesIsSilent(t *testing.T) {
	l := newLab(t, "name", "silent", "bridge", "btsil", "isGateway", false, "ipMasq", false, "ipam", object{})
	in := l.add("v").tap()
	mac := net.HardwareAddr{2, 0, 0, 0, 0x53, 1}
	m := l.other().add("m", "capabilities", object{"mac": true}, "runtimeConfig", object{"mac": mac.String()})
	end := ether(net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac, 0x88b5, make([]byte, 46))
	if _, err := unix.Write(m.tap(), end); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2048)
	for !bytes.Equal(buf[:len(end)], end) {
		n, _, err := harness.ReceiveFrame(in, buf, 20*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(buf[6:12], mac) && !bytes.Equal(buf[:n], end) {
			t.Errorf("the port sent %x", buf[:n])
		}
	}
	kerneltest.Must(t, m.runInPod("sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0"))
	m.OK(m.check())
}
