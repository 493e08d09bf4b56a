// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net"
	"testing"

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
