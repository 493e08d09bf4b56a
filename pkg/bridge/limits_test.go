// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// These tests show limits that SECURITY.md states.

// TestIsolatedByBridgeOnly: portIsolation keeps two pods apart on the bridge, but the node forwards what one sends to the gateway's MAC,
// unless an admin adds the rule of SECURITY.md.
func TestIsolatedByBridgeOnly(t *testing.T) {
	l := newLab(t, "name", "isolated", "bridge", "btiso", "hairpinMode", false, "portIsolation", true)
	a, b := l.add("a"), l.other().add("b")
	m, v, gateway := a.station(), b.station(), a.bridgeMAC()
	direct := frame{"direct", always, udp4(v.mac, m.mac, m.v4, v.v4, 1, 2, "direct")}
	forwarded := udp4(v.mac, gateway, m.v4, v.v4, 1, 2, "forwarded")
	forwarded[22]-- // hops
	copy(forwarded[24:], []byte{0, 0})
	copy(forwarded[24:], checksum(forwarded[14:34]))
	in := b.tap()
	a.send(direct.bytes, udp4(gateway, m.mac, m.v4, v.v4, 1, 2, "forwarded"))
	if n := l.copiesUntil(in, forwarded, direct)["direct"]; n > 0 {
		t.Error("the bridge passed a frame between isolated ports")
	}
	l.run(`nft -f - <<'END'
table inet own {
	chain forward {
		type filter hook forward priority 0
		ct status dnat accept
		iifname "btiso" oifname "btiso" drop
	}
}
END`)
	t.Cleanup(func() { l.run("nft delete table inet own") })
	a.send(udp4(gateway, m.mac, m.v4, v.v4, 1, 2, "forwarded"))
	conn, err := net.Dial("udp", net.JoinHostPort(v.v4.String(), "9"))
	if err == nil {
		defer conn.Close()
		_, err = conn.Write([]byte("of the node"))
	}
	kerneltest.Must(t, err)
	if n := l.copiesUntil(in, []byte("of the node"), frame{"forwarded", always, forwarded})["forwarded"]; n > 0 {
		t.Error("the rule of SECURITY.md does not separate isolated pods")
	}
}

// TestMulticastIsNotPrivate: without a multicast querier a pod gets groups that it has not joined, and the kernel switches snooping off for
// the whole bridge when pods join more groups than it stores.
func TestMulticastIsNotPrivate(t *testing.T) {
	l := newLab(t, "name", "groups", "bridge", "btgrp", "antiSpoof", true)
	a, b := l.add("a"), l.other().add("b")
	m, v := a.station(), b.station()
	group := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{239, 1, byte(n >> 8), byte(n)}) }
	others := frame{"group", always, udp4(groupMAC(group(7)), m.mac, m.v4, group(7), 1, 2, "group")}
	end := udp4(v.mac, m.mac, m.v4, v.v4, 1, 2, "end")
	in := b.tap()
	a.send(others.bytes, end)
	if n := l.copiesUntil(in, end, others)["group"]; n != 1 {
		t.Errorf("the pod got the packet to a group of others %d times, want once", n)
	}
	snoops := func() bool { return strings.Contains(l.run("ip -d link show btgrp"), "mcast_snooping 1") }
	if !snoops() {
		t.Fatal("the bridge does not snoop before the joins")
	}
	var joins [][]byte
	for n := range 5000 {
		joins = append(joins, ip4(groupMAC(group(n)), m.mac, m.v4, group(n), unix.IPPROTO_IGMP, 0, nil, igmp(report4v2, group(n))))
	}
	if a.send(joins...); snoops() {
		t.Error("the bridge still snoops after 5,000 joins: correct SECURITY.md")
	}
	l.run("ip link set btgrp type bridge mcast_snooping 1")
}
