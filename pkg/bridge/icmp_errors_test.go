// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// quoting4 returns an ICMP error from m to a station about an echo reply, which its sender believes without a socket.
func (p pair) quoting4(to station, kind, code byte, src, dst netip.Addr) []byte {
	about := ip4(p.v.mac, p.m.mac, src, dst, unix.IPPROTO_ICMP, 0, nil, make([]byte, 8))[14:]
	message := slices.Concat([]byte{kind, code, 0, 0}, be(0), be(600), about) // a path MTU of 600 bytes
	copy(message[2:], checksum(message))
	return ip4(to.mac, p.m.mac, p.m.v4, to.v4, unix.IPPROTO_ICMP, 0, nil, message)
}

// quoting6 is quoting4 for ICMPv6.
func (p pair) quoting6(to station, kind byte, src, dst netip.Addr) []byte {
	about := icmp(p.v.mac, p.m.mac, src, dst, 129, make([]byte, 4))[14:]
	return icmp(to.mac, p.m.mac, p.m.v6, to.v6, kind, []byte{0, 0, 5, 20}, about) // 1300 bytes
}

// TestICMPErrors (S-25): a guarded pod sends ICMP errors only about packets to its own addresses, as a host or a router that
// masquerades does. An unguarded one lowers the path MTU between the node and other pods.
func TestICMPErrors(t *testing.T) {
	l := newLab(t, "name", "errors", "bridge", "bterr", "antiSpoof", true)
	guarded, other, v, w := l.add("guarded"), l.other().add("other", "antiSpoof", false), l.other().add("v"), l.other().add("w")
	bridge, err := netlink.LinkByName("bterr")
	if err != nil {
		t.Fatal(err)
	}
	node := station{mac: bridge.Attrs().HardwareAddr, v4: netip.MustParseAddr("10.60.0.1")}
	for _, sender := range []attached{guarded, other} {
		p, third := pair{sender.station(), v.station()}, w.station()
		var frames []frame
		for _, kind := range []byte{3, 11, 12} {
			frames = append(frames, frame{fmt.Sprint("ICMP type ", kind), always, p.quoting4(p.v, kind, 4, p.v.v4, p.m.v4)},
				frame{fmt.Sprint("forged ICMP type ", kind), forgery, p.quoting4(p.v, kind, 4, p.v.v4, third.v4)})
		}
		for _, kind := range []byte{1, 2, 3, 4} {
			frames = append(frames, frame{fmt.Sprint("ICMPv6 type ", kind), always, p.quoting6(p.v, kind, p.v.v6, p.m.v6)},
				frame{fmt.Sprint("forged ICMPv6 type ", kind), forgery, p.quoting6(p.v, kind, p.v.v6, third.v6)})
		}
		error4, error6 := p.quoting4(p.v, 3, 4, p.v.v4, third.v4)[34:], p.quoting6(p.v, 2, p.v.v6, third.v6)[54:]
		frames = append(frames,
			frame{"forged ICMP error behind IP options", forgery, p.in4(unix.IPPROTO_ICMP, 0, []byte{1, 1, 1, 0}, error4)},
			frame{"forged ICMPv6 error behind options", forgery, ip6(p.v.mac, p.m.mac, p.m.v6, p.v.v6, 60,
				slices.Concat(destinationOptions(58), error6))})
		sender.checkArrivals(v, frames...)
		arrivals(sender, v, [][]byte{p.quoting4(node, 3, 4, node.v4, third.v4), p.quoting4(p.v, 3, 4, p.v.v4, third.v4),
			p.quoting6(p.v, 2, p.v.v6, third.v6), p.lastFrame()})
		if got := pathMTU(t, third.v4); (got == 1500) != (sender.id == "guarded") {
			t.Errorf("after errors of the pod %s: the node's path MTU to %s is %d", sender.id, third.v4, got)
		}
		kerneltest.Must(t, v.Pod.Do(func() error {
			for _, to := range []netip.Addr{third.v4, third.v6} {
				if got := pathMTU(t, to); (got == 1500) != (sender.id == "guarded") {
					t.Errorf("after errors of the pod %s: another pod's path MTU to %s is %d", sender.id, to, got)
				}
			}
			return nil
		}))
	}
	l.OK(guarded.check())
}

// TestMasqueradingRouter: a guarded pod that masquerades for a nested container reports the smaller MTU behind it to its neighbours.
func TestMasqueradingRouter(t *testing.T) {
	l := newLab(t, "name", "nested", "bridge", "btnest", "antiSpoof", true)
	m, v, nested := l.add("m"), l.other().add("v"), l.other().Pod
	kerneltest.Must(t, m.runInPod(`ip link add name inner0 mtu 1300 type veth peer name eth0 mtu 1300 netns `+nested.Path+`
		ip addr add 192.0.2.1/24 dev inner0; ip link set inner0 up; echo 1 >/proc/sys/net/ipv4/ip_forward
		nft add table ip m; nft 'add chain ip m p { type nat hook postrouting priority 100; }'; nft add rule ip m p oif eth0 masquerade`),
		nested.Do(func() error {
			return m.run("ip addr add 192.0.2.2/24 dev eth0; ip link set eth0 up; ip route add default via 192.0.2.1")
		}))
	defer func() { kerneltest.Must(t, m.runInPod("nft delete table ip m; echo 0 >/proc/sys/net/ipv4/ip_forward")) }()
	var server net.PacketConn
	kerneltest.Must(t, v.Pod.Do(func() (err error) { server, err = net.ListenPacket("udp4", ":7"); return err }))
	defer server.Close()
	kerneltest.Must(t, nested.Do(func() error {
		client, err := net.Dial("udp4", netip.AddrPortFrom(v.station().v4, 7).String())
		if err == nil {
			defer client.Close()
			_, err = client.Write([]byte("hello"))
		}
		return err
	}))
	kerneltest.Must(t, server.SetReadDeadline(time.Now().Add(20*time.Second)))
	_, client, err := server.ReadFrom(make([]byte, 9))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := server.WriteTo(make([]byte, 1400), client); err != nil {
		t.Fatal(err)
	}
	kerneltest.Must(t, v.Pod.Do(func() error {
		if got := pathMTU(t, m.station().v4); got != 1300 {
			t.Errorf("the path MTU to the router is %d, want 1300", got)
		}
		return nil
	}))
}

// pathMTU returns the path MTU to an address, which is that of the link unless the kernel has learned a smaller one.
func pathMTU(t *testing.T, to netip.Addr) int {
	t.Helper()
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) != 1 {
		t.Fatal(routes, err)
	}
	if routes[0].MTU > 0 {
		return routes[0].MTU
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().MTU
}
