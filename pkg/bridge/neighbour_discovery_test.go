// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
)

// linkOption is a source (1) or target (2) link-layer address option of neighbour discovery (RFC 4861 section 4.6.1).
func linkOption(kind byte, mac net.HardwareAddr) []byte { return slices.Concat([]byte{kind, 1}, mac) }

// nonceOption is what duplicate address detection appends (RFC 7527).
func nonceOption() []byte { return []byte{nonce, 1, 1, 2, 3, 4, 5, 6} }

// discovery returns messages of neighbour discovery from m to v that a guarded port may send.
func (p pair) discovery() []frame {
	zero, none, flags := netip.IPv6Unspecified(), make([]byte, 4), []byte{0x60, 0, 0, 0}
	send := func(from netip.Addr, kind byte, body ...[]byte) []byte {
		return icmp(p.v.mac, p.m.mac, from, p.v.v6, kind, body...)
	}
	own := linkOption(sourceMAC, p.m.mac)
	return []frame{
		{"solicitation with the pod's MAC", always, send(p.m.v6, neighSolicit, none, p.v.v6.AsSlice(), own)},
		{"solicitation from the link-local address", always, send(p.m.linkLo, neighSolicit, none, p.v.v6.AsSlice(), own)},
		{"solicitation without a MAC", always, send(p.m.v6, neighSolicit, none, p.v.v6.AsSlice())},
		{"duplicate address detection", always, send(zero, neighSolicit, none, p.m.v6.AsSlice())},
		{"duplicate address detection with a nonce", always, send(zero, neighSolicit, none, p.m.v6.AsSlice(), nonceOption())},
		{"advertisement with the pod's MAC", always, send(p.m.v6, neighAdvert, flags, p.m.v6.AsSlice(), linkOption(targetMAC, p.m.mac))},
		{"advertisement without a MAC", always, send(p.m.v6, neighAdvert, flags, p.m.v6.AsSlice())},
		{"router solicitation with the pod's MAC", always, send(p.m.linkLo, routerSolicit, none, own)},
		{"router solicitation without a MAC", always, send(p.m.linkLo, routerSolicit, none)},
		{"router solicitation from the unspecified address", always, send(zero, routerSolicit, none)},
	}
}

// wrongMACs returns messages with the pod's own addresses that lead its neighbours to the given MAC, or could in another kernel.
func (p pair) wrongMACs(mac net.HardwareAddr) (frames []frame) {
	zero, none, flags := netip.IPv6Unspecified(), make([]byte, 4), []byte{0x60, 0, 0, 0}
	message := func(from netip.Addr, kind byte, body ...[]byte) []byte {
		return icmp6Message(from, p.v.v6, kind, body...)
	}
	for _, m := range []struct {
		what   string
		kind   byte
		option byte
		body   []byte
	}{
		{"solicitation", neighSolicit, sourceMAC, slices.Concat(none, p.v.v6.AsSlice())},
		{"advertisement", neighAdvert, targetMAC, slices.Concat(flags, p.m.v6.AsSlice())},
		{"router solicitation", routerSolicit, sourceMAC, none},
	} {
		forged := linkOption(m.option, mac)
		plain := message(p.m.v6, m.kind, m.body, forged)
		for _, way := range []struct {
			what  string
			from  netip.Addr
			first byte
			body  []byte
		}{
			{"", p.m.v6, 58, plain},
			{" behind the pod's own", p.m.v6, 58, message(p.m.v6, m.kind, m.body, linkOption(m.option, p.m.mac), forged)},
			{" behind a nonce", p.m.v6, 58, message(p.m.v6, m.kind, m.body, nonceOption(), forged)},
			{" in the other option", p.m.v6, 58, message(p.m.v6, m.kind, m.body, linkOption(3-m.option, mac))},
			{" in an option of 16 octets", p.m.v6, 58, message(p.m.v6, m.kind, m.body, withByte(forged, 1, 2), make([]byte, 8))},
			{" behind hop-by-hop options", p.m.v6, 0, slices.Concat(hopByHop(58), plain)},
			{" behind destination options", p.m.v6, 60, slices.Concat(destinationOptions(58), plain)},
			{" behind a routing header", p.m.v6, 43, slices.Concat(routing(58), plain)},
			{", the only fragment", p.m.v6, 44, slices.Concat(fragment(58, 0), plain)},
			{", first fragment without the option", p.m.v6, 44, slices.Concat(fragment(58, 1), plain[:len(plain)-8])},
			{" from the unspecified address", zero, 58, message(zero, m.kind, m.body, forged)},
		} {
			frames = append(frames, frame{"S-20 " + mac.String() + " in a " + m.what + way.what, forgery,
				ip6(p.v.mac, p.m.mac, way.from, p.v.v6, way.first, way.body)})
		}
	}
	probe := slices.Concat(none, p.m.v6.AsSlice())
	return append(frames,
		frame{"S-20 duplicate address detection with a MAC", forgery,
			icmp(p.v.mac, p.m.mac, zero, p.v.v6, neighSolicit, probe, linkOption(sourceMAC, mac))},
		frame{"S-20 duplicate address detection with a nonce and a MAC", forgery,
			icmp(p.v.mac, p.m.mac, zero, p.v.v6, neighSolicit, probe, nonceOption(), linkOption(sourceMAC, mac))})
}

// TestNeighbourDiscoveryMACs (S-20): a guarded pod's neighbour discovery names no other MAC than its own. An unguarded pod can make the
// node send its traffic to another pod, or to all.
func TestNeighbourDiscoveryMACs(t *testing.T) {
	l := newLab(t, "name", "options", "bridge", "btnd", "antiSpoof", true, "isGateway", false, "ipMasq", false)
	l.setBridged("0") // the IP families' rules would reassemble fragments
	guarded, other, v := l.add("guarded"), l.other().add("other", "antiSpoof", false), l.other().add("v")
	node, err := netlink.LinkByName("btnd")
	if err != nil {
		t.Fatal(err)
	}
	unknown := net.HardwareAddr{2, 0, 0x5e, 0, 0x53, 1}
	macs := []net.HardwareAddr{v.station().mac, unknown, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {0x33, 0x33, 0, 0, 0, 1}, make([]byte, 6)}
	for _, sender := range []attached{guarded, other} {
		p := pair{sender.station(), v.station()}
		frames := p.discovery()
		for _, mac := range macs {
			frames = append(frames, p.wrongMACs(mac)...)
		}
		sender.checkArrivals(v, frames...)
		toNode := pair{p.m, station{mac: node.Attrs().HardwareAddr, v6: linkLocal(node.Attrs().HardwareAddr)}}
		end := p.in4(unix.IPPROTO_UDP, 0, nil, datagram(1, 3))
		var sent [][]byte
		for _, f := range append(toNode.discovery(), toNode.wrongMACs(unknown)...) {
			sent = append(sent, f.bytes)
		}
		arrivals(sender, v, append(sent, end))
		if got, want := l.neighbour(p.m.v6), p.m.mac; bytes.Equal(got, want) != (sender.id == "guarded") {
			t.Errorf("the node sends packets for the pod %s to %s, its MAC is %s", sender.id, got, want)
		}
	}
	l.OK(guarded.check())
}

// neighbour returns the MAC to which the node sends packets for an address.
func (l lab) neighbour(address netip.Addr) net.HardwareAddr {
	l.Helper()
	entries, err := netlink.NeighList(0, netlink.FAMILY_V6)
	if err != nil {
		l.Fatal(err)
	}
	for _, e := range entries {
		if e.IP.Equal(address.AsSlice()) {
			return e.HardwareAddr
		}
	}
	return nil
}

// TestGuardedDuplicateDetection: duplicate address detection of a guarded pod reaches its neighbours with the kernel's nonce and without
// one.
func TestGuardedDuplicateDetection(t *testing.T) {
	l := newLab(t, "name", "dad", "bridge", "btdad", "antiSpoof", true, "enabledad", true)
	v, m := l.add("v"), l.other().add("m")
	for enhanced, length := range map[string]int{"1": 32, "0": 24} {
		in := v.tap()
		if err := m.Pod.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			address := &netlink.Addr{IPNet: &net.IPNet{IP: m.station().v6.AsSlice(), Mask: net.CIDRMask(64, 128)}}
			return errors.Join(os.WriteFile("/proc/sys/net/ipv6/conf/eth0/enhanced_dad", []byte(enhanced), 0),
				os.WriteFile("/proc/sys/net/ipv6/conf/all/enhanced_dad", []byte(enhanced), 0),
				netlink.AddrDel(link, address), netlink.AddrAdd(link, address))
		}); err != nil {
			t.Fatal(err)
		}
		if err := awaitProbe(in, m.station().v6, length); err != nil {
			t.Errorf("no solicitation of %d octets reached the neighbour: %v", length, err)
		}
	}
}

// awaitProbe waits until a tap gets a duplicate address detection of the given length.
func awaitProbe(tap int, address netip.Addr, length int) error {
	head := slices.Concat(be(uint16(length)), []byte{58, 255}, make([]byte, 16))
	buf := make([]byte, 2048)
	for {
		n, _, err := harness.ReceiveFrame(tap, buf, 20*time.Second)
		if err != nil {
			return err
		}
		if n == 54+length && bytes.Equal(buf[18:38], head) && bytes.Equal(buf[62:78], address.AsSlice()) {
			return nil
		}
	}
}
