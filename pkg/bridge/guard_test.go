// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
)

// Kinds of frames by the protection that drops them.
const (
	always   = iota // no protection stops it
	forgery         // antiSpoof stops it
	otherMAC        // macspoofchk stops it too
)

type frame struct {
	what  string
	kind  int
	bytes []byte
}

// traffic returns allowed and forbidden frames from pod m to pod v.
func traffic(m, v station) []frame {
	var (
		gateway4   = netip.MustParseAddr("10.60.0.1")
		gateway6   = netip.MustParseAddr("fd00:60::1")
		zero4      = netip.IPv4Unspecified()
		zero6      = netip.IPv6Unspecified()
		broadcast4 = netip.MustParseAddr("255.255.255.255")
		allNodes   = netip.MustParseAddr("ff02::1")
		forged, _  = net.ParseMAC("02:00:5e:00:53:01")
		flags      = []byte{0x60, 0, 0, 0} // flags: solicited, override
		none       = make([]byte, 4)
	)
	return []frame{
		{"ARP that asks", always, arpFrame(v.mac, m.mac, 1, m.mac, m.v4, v.v4)},
		{"ARP that answers", always, arpFrame(v.mac, m.mac, 2, m.mac, m.v4, v.v4)},
		{"ARP probe", always, arpFrame(v.mac, m.mac, 1, m.mac, zero4, m.v4)},
		{"IPv4", always, udp4(v.mac, m.mac, m.v4, v.v4, 1000, 2000, "plain")},
		{"DHCP client", always, ip4(v.mac, m.mac, zero4, broadcast4, unix.IPPROTO_UDP, 0, nil, dhcpRequest(m.mac, zero4))},
		{"IPv6", always, udp6(v.mac, m.mac, m.v6, v.v6, 1000, 2000, "plain")},
		{"IPv6 link-local", always, udp6(v.mac, m.mac, m.linkLo, v.linkLo, 1000, 2000, "plain")},
		{"neighbour solicitation", always, icmp(v.mac, m.mac, m.v6, v.v6, 135, none, v.v6.AsSlice())},
		{"duplicate address detection", always, icmp(v.mac, m.mac, zero6, allNodes, 135, none, m.v6.AsSlice())},
		{"neighbour advertisement", always, icmp(v.mac, m.mac, m.v6, v.v6, 136, flags, m.v6.AsSlice())},
		{"router solicitation", always, icmp(v.mac, m.mac, m.linkLo, allNodes, 133, none)},
		{"MLD report", always, icmp(v.mac, m.mac, zero6, allNodes, 143, none)},

		{"S-20 ARP answer for the gateway", forgery, arpFrame(v.mac, m.mac, 2, m.mac, gateway4, v.v4)},
		{"S-20 ARP question as the gateway", forgery, arpFrame(v.mac, m.mac, 1, m.mac, gateway4, v.v4)},
		{"S-20 ARP with another MAC inside", forgery, arpFrame(v.mac, m.mac, 2, forged, m.v4, v.v4)},
		{"S-20 gratuitous ARP for the victim", forgery, arpFrame(v.mac, m.mac, 2, m.mac, v.v4, v.v4)},
		{"S-20 ARP answer from 0.0.0.0", forgery, arpFrame(v.mac, m.mac, 2, m.mac, zero4, v.v4)},
		{"S-21 IPv4 as the gateway", forgery, udp4(v.mac, m.mac, gateway4, v.v4, 1000, 2000, "forged")},
		{"S-21 IPv4 from the unspecified address", forgery, udp4(v.mac, m.mac, zero4, v.v4, 1000, 2000, "forged")},
		{"S-21 IPv6 as the gateway", forgery, udp6(v.mac, m.mac, gateway6, v.v6, 1000, 2000, "forged")},
		{"S-21 IPv6 as another link-local address", forgery, udp6(v.mac, m.mac, netip.MustParseAddr("fe80::1"), v.v6, 1000, 2000, "forged")},
		{"S-21 IPv6 from the unspecified address", forgery, udp6(v.mac, m.mac, zero6, v.v6, 1000, 2000, "forged")},
		{"S-22 IPv4 from another MAC", otherMAC, udp4(v.mac, forged, m.v4, v.v4, 1000, 2000, "other MAC")},
		{"S-22 ARP from another MAC", otherMAC, arpFrame(v.mac, forged, 2, forged, m.v4, v.v4)},
		{"S-03 router advertisement", forgery, icmp(v.mac, m.mac, m.linkLo, allNodes, 134, []byte{64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0})},
		{"S-23 neighbour advertisement for the gateway", forgery, icmp(v.mac, m.mac, m.v6, v.v6, 136, flags, gateway6.AsSlice())},
		{"S-23 redirect", forgery, icmp(v.mac, m.mac, m.linkLo, v.v6, 137, none, m.v6.AsSlice(), gateway6.AsSlice())},
		{"S-23 DHCP server", forgery, udp4(v.mac, m.mac, m.v4, v.v4, 67, 68, "offer")},
		{"S-23 DHCPv6 server", forgery, udp6(v.mac, m.mac, m.linkLo, v.linkLo, 547, 546, "advertise")},
		{"S-23 MLD query", forgery, icmp(v.mac, m.mac, m.linkLo, allNodes, 130, none, none)},
		{"S-23 VLAN tag", forgery, ether(v.mac, m.mac, unix.ETH_P_8021Q, be(5), udp4(v.mac, m.mac, m.v4, v.v4, 1000, 2000, "tagged")[12:])},
		{"S-23 LLDP", forgery, ether(v.mac, m.mac, 0x88cc, []byte("neighbour"))},
		{"S-23 spanning tree", forgery, ether(v.mac, m.mac, 38, []byte{0x42, 0x42, 3}, make([]byte, 35))},
		{"S-23 unknown protocol", forgery, ether(v.mac, m.mac, 0x88b5, []byte("experiment"))},

		{"the end", always, udp4(v.mac, m.mac, m.v4, v.v4, 1000, 2000, "end")},
	}
}

// TestNeighbours (S-24) shows how a pod can affect another one: without protection, with the reference plugin's, and with Podlace's.
func TestNeighbours(t *testing.T) {
	for _, protection := range []struct {
		name   string
		keys   []any
		passes int // frames up to this kind arrive
	}{{"nothing", nil, otherMAC}, {"macspoofchk", []any{"macspoofchk", true}, forgery}, {"antiSpoof", []any{"antiSpoof", true}, always},
		{"both", []any{"antiSpoof", true, "macspoofchk", true}, always}} {
		t.Run(protection.name, func(t *testing.T) {
			l := newLab(t, append([]any{"name", "guarded", "bridge", "btg"}, protection.keys...)...)
			// the rules must work for the longest container IDs
			m, v := l.add(strings.Repeat("m", 250)), l.other().add(strings.Repeat("v", 250))
			frames := traffic(m.station(), v.station())
			var sent [][]byte
			for _, f := range frames {
				sent = append(sent, f.bytes)
			}
			for i, arrived := range arrivals(m, v, sent) {
				if want := frames[i].kind <= protection.passes; arrived != want {
					t.Errorf("%s: arrived %t, want %t", frames[i].what, arrived, want)
				}
			}
			l.OK(m.check())
			l.OK(v.check())
		})
	}
}

// TestStolenMAC (S-22): an unprotected bridge sends the victim's traffic to a pod that sent a frame with the victim's MAC.
func TestStolenMAC(t *testing.T) {
	l := newLab(t, "name", "stolen", "bridge", "btg5", "macspoofchk", true)
	m, v, other := l.add("m"), l.other().add("v"), l.other().add("other")
	thief, sender := m.tap(), other.tap()
	theft := udp4(other.station().mac, v.station().mac, v.station().v4, other.station().v4, 1, 2, "theft")
	prey := udp4(v.station().mac, other.station().mac, other.station().v4, v.station().v4, 1, 2, "prey")
	for range 20 { // the victim regains its MAC whenever it sends
		for fd, frame := range map[int][]byte{thief: theft, sender: prey} {
			if _, err := unix.Write(fd, frame); err != nil {
				t.Fatal(err)
			}
		}
	}
	arrivals(other, m, [][]byte{udp4(m.station().mac, other.station().mac, other.station().v4, m.station().v4, 1, 2, "end")})
	if arrived(thief, prey) {
		t.Fatal("the sender received the frames for the victim")
	}
}

// TestGuardedUntilGone: no forged frame of a pod passes while DEL removes its guard.
func TestGuardedUntilGone(t *testing.T) {
	l := newLab(t, "name", "gone", "bridge", "btg6", "antiSpoof", true)
	v := l.other().add("v")
	in := v.tap()
	for range 5 {
		m := l.add("m")
		forged := udp4(v.station().mac, m.station().mac, netip.MustParseAddr("10.60.0.1"), v.station().v4, 1000, 2000, "forged")
		out := m.tap()
		var flood sync.WaitGroup
		begun, gone := make(chan struct{}), atomic.Bool{}
		flood.Go(func() {
			for i := 0; !gone.Load(); i++ {
				if _, _ = unix.Write(out, forged); i == 100 { // it fails as soon as the link is down
					close(begun)
				}
			}
		})
		<-begun
		l.OK(l.Call("DEL", "m"))
		gone.Store(true)
		flood.Wait()
		if arrived(in, forged) {
			t.Fatal("a forged frame arrived during DEL")
		}
	}
}

// TestGuardedPodsTalk: two guarded pods reach each other.
func TestGuardedPodsTalk(t *testing.T) {
	l := newLab(t, "name", "talk", "bridge", "btg2", "antiSpoof", true, "ipam", hostLocal("10.68.0.0/24", "fd00:68::/64"))
	a, b := l.add("a"), l.other().add("b")
	b.serve("tcp4", ":80")
	b.serve("tcp6", ":80")
	for _, ip := range b.result.IPs {
		if got, err := a.fetchAnswer(net.JoinHostPort(ip.Address.IP.String(), "80"), harness.TrafficLimit); got != "b" || err != nil {
			t.Errorf("%s: %q, %v", ip.Address.IP, got, err)
		}
	}
}

// TestCheckGuard: CHECK reports each missing part of a guard, and the next pod's ADD restores the table for all pods of the network.
func TestCheckGuard(t *testing.T) {
	l := bareLab(t, "name", "checked", "bridge", "btg3", "antiSpoof", true)
	t.Cleanup(func() { _ = onHost("btg3", netlink.LinkDel) })
	a := l.add("a")
	table := &nftables.Table{Name: "podlace_guard", Family: nftables.TableFamilyBridge}
	flush := func(f func(*nftables.Conn)) {
		t.Helper()
		c, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		f(c)
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	for _, set := range []string{"mac_ports", "macs", "ports", "addresses4", "addresses6"} {
		l.OK(a.check())
		flush(func(c *nftables.Conn) { c.FlushSet(&nftables.Set{Table: table, Name: set}) })
		l.Fails(a.check(), plugin.CodeStateDiffers, "the guard of "+a.hostVeth()+" misses an entry in nftables set "+set)
		l.OK(l.Call("DEL", "a"))
		a = l.add("a")
	}
	for _, chain := range []string{"prerouting", "mac", "guard", "arp", "ip", "ip6"} {
		flush(func(c *nftables.Conn) { c.FlushChain(&nftables.Chain{Table: table, Name: chain}) })
		l.Fails(a.check(), plugin.CodeStateDiffers, "the rules of nftables table bridge podlace_guard are missing")
		flush(func(c *nftables.Conn) { c.FlushRuleset() })
		l.Fails(a.check(), plugin.CodeStateDiffers, "the rules of nftables table bridge podlace_guard are missing")
		b := l.other()
		b.OK(b.Call("ADD", "b"))
		l.OK(a.check())
		b.OK(b.Call("DEL", "b"))
	}
}

// TestGuardsAfterFlush: the first ADD after any kind of flush restores the guards of all pods in all networks.
func TestGuardsAfterFlush(t *testing.T) {
	l := bareLab(t, "name", "flushed", "bridge", "btg6", "antiSpoof", true, "isGateway", nil, "ipMasq", nil)
	t.Cleanup(func() { _ = onHost("btg6", netlink.LinkDel) })
	a, b := l.add("a"), l.other()
	b.Conf = l.Conf.With("name", "flushed2", "ipam", hostLocal("10.69.0.0/24"))
	inOther := b.add("b")
	for what, flush := range map[string]func(*nftables.Conn){
		"ruleset": func(c *nftables.Conn) { c.FlushRuleset() },
		"table": func(c *nftables.Conn) {
			c.FlushTable(&nftables.Table{Name: "podlace_guard", Family: nftables.TableFamilyBridge})
		},
	} {
		l.OK(a.check())
		inOther.OK(inOther.check())
		c, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		flush(c)
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
		l.Fails(a.check(), plugin.CodeStateDiffers, "missing")
		next := l.other()
		next.OK(next.Call("ADD", "next"))
		l.OK(a.check())
		inOther.OK(inOther.check())
		next.OK(next.Call("DEL", "next"))
		t.Log(what)
	}
}

// TestGuardOfLongNames: guards also work for pods whose name does not fit into an nftables comment.
func TestGuardOfLongNames(t *testing.T) {
	l := newLab(t, "name", "longnames", "bridge", "btg7", "macspoofchk", true)
	for _, n := range []int{100, 127, 200, 247, 253} {
		l.OK(l.Call("ADD", "a", "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME="+strings.Repeat("x", n)))
		l.OK(l.Call("DEL", "a"))
	}
}

// TestGuardWithoutRecord: DEL removes the guard even if the record is lost.
func TestGuardWithoutRecord(t *testing.T) {
	l := newLab(t, "name", "lost", "bridge", "btg8", "antiSpoof", true)
	a := l.add("a")
	a.loseRecord()
	l.OK(l.Call("DEL", "a", "prevResult", a.prev))
}

// TestPodTakesNoRoutes (S-02, S-03): the node and other pods ignore a router advertisement that the bridge does not drop.
func TestPodTakesNoRoutes(t *testing.T) {
	l := newLab(t, "name", "believers", "bridge", "btg4")
	m, v := l.add("m"), l.other().add("v")
	bridge, err := net.ParseMAC(v.result.Interfaces[0].Mac)
	if err != nil {
		t.Fatal(err)
	}
	from, to := m.station(), v.station()
	advert := func(mac net.HardwareAddr) []byte {
		return icmp(mac, from.mac, from.linkLo, netip.MustParseAddr("ff02::1"), 134, []byte{64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0},
			// a prefix option with the flags "on-link" and "autonomous" (RFC 4861 section 4.6.2)
			[]byte{3, 4, 64, 0xc0, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0}, netip.MustParseAddr("fd66::").AsSlice())
	}
	arrivals(m, v, [][]byte{advert(bridge), advert(to.mac), udp4(to.mac, from.mac, from.v4, to.v4, 1, 2, "end")})
	believed := func() error {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Protocol: unix.RTPROT_RA}, netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return err
		}
		addresses, err := netlink.AddrList(nil, netlink.FAMILY_V6)
		if len(routes) > 0 || slices.ContainsFunc(addresses, func(a netlink.Addr) bool { return strings.HasPrefix(a.IP.String(), "fd66:") }) {
			t.Errorf("believed: %v, %v", routes, addresses)
		}
		return err
	}
	if err := believed(); err != nil {
		t.Fatal(err)
	}
	if err := v.Pod.Do(believed); err != nil {
		t.Fatal(err)
	}
	redirects := func() error {
		for _, conf := range []string{"accept_ra", "accept_redirects"} {
			data, err := os.ReadFile("/proc/sys/net/ipv6/conf/eth0/" + conf)
			if err != nil || strings.TrimSpace(string(data)) != "0" {
				t.Errorf("%s is %s, %v", conf, data, err)
			}
		}
		return nil
	}
	if err := v.Pod.Do(redirects); err != nil {
		t.Fatal(err)
	}
}

// TestGCLeavesRunningADD: GC leaves a guard or masquerade alone that a running ADD is about to write.
func TestGCLeavesRunningADD(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) { testGCLeavesRunningADD(t, backend) })
	}
}

func testGCLeavesRunningADD(t *testing.T, backend string) {
	if backend == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := bareLab(t, "name", "runs", "bridge", "btrun", "ipam", hostLocal("10.77.0.0/24"), "antiSpoof", true, "ipMasqBackend", backend)
	l.withoutBridge()
	valid := []any{}
	for _, id := range []string{"a", "b"} {
		l.other().add(id)
		valid = append(valid, object{"containerID": id, "ifname": "eth0"})
	}
	unfinish(t, l, "b")
	var st state
	records, err := attachment.List("runs", "bridge")
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range records {
		if rec.ContainerID == "b" {
			err = json.Unmarshal(rec.State, &st)
		}
	}
	if err := errors.Join(err, delGuard(l.host(), *st.Guard)); err != nil {
		t.Fatal(err)
	}
	if log := l.OK(l.Call("GC", "", "cni.dev/valid-attachments", valid)).Log; strings.Contains(log, "restored") {
		t.Errorf("nothing was flushed: %s", log)
	}
}

// TestManyGuards writes the guards of many pods in one transaction, as a restore after a flush does. It is larger than the usual buffer of
// a socket, and smaller than what an ordinary user may have (twice net.core.wmem_max).
func TestManyGuards(t *testing.T) {
	h := emptyNode(t)
	var all []Guard
	for i := range 1200 {
		all = append(all, Guard{Link: fmt.Sprintf("veth%d", i), MAC: net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)}.String(),
			Owner: "0123456789abcdef namespace/pod", Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}})
	}
	kerneltest.Must(t, SetGuards(all), compareGuards(h, all...))
}
