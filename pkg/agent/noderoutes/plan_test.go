// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
)

// runPlan calls Peers and Plan for the node "self". 192.0.2.0/24 and 2001:db8::/64 are on its link 2, 203.0.113.0/24 is unreachable, and
// all else is behind a router on link 3.
func runPlan(t *testing.T, cfg Config, nodes ...Node) (Wanted, []Peer, nodefile.Node) {
	t.Helper()
	cfg.Self = "self"
	me, peers, err := Peers(nodes, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return Plan(me, peers, waysOf(me, peers), cfg)
}

func waysOf(me Self, peers []Peer) map[netip.Addr]Way {
	ways := map[netip.Addr]Way{}
	for _, a := range me.Addresses {
		ways[a] = Way{Link: kernel.Link{Index: 1, Name: "lo", MTU: 65536}}
	}
	for _, p := range peers {
		switch a := p.Gateway; {
		case !a.IsValid():
		case netip.MustParsePrefix("203.0.113.0/24").Contains(a):
			ways[a] = Way{Reason: "network is unreachable"}
		case netip.MustParsePrefix("192.0.2.0/24").Contains(a) || netip.MustParsePrefix("2001:db8::/64").Contains(a):
			ways[a] = Way{Link: kernel.Link{Index: 2, Name: "eth0", MTU: 9000}, OnLink: true}
		default:
			ways[a] = Way{Link: kernel.Link{Index: 3, Name: "eth1", MTU: 1500}}
		}
	}
	return ways
}

// routeTexts formats the routes with their next hops like ip-route(8).
func (w Wanted) routeTexts() (lines []string) {
	hops := map[uint32]kernel.Nexthop{}
	for _, h := range w.Nexthops {
		hops[h.ID] = h
	}
	for _, r := range w.Routes {
		if h, ok := hops[r.Nexthop]; ok {
			line := fmt.Sprintf("%s via %s dev %d", r.Dst, h.Gateway, h.Link)
			if h.OnLink {
				line += " onlink"
			}
			lines = append(lines, line)
		} else {
			lines = append(lines, fmt.Sprintf("unreachable %s metric %d", r.Dst, r.Metric))
		}
	}
	return lines
}

func TestPlan(t *testing.T) {
	nodes := []Node{self(), nodeOf("near", 1, "10.1.2.0/24 fd00:2::/64", "192.0.2.2 2001:db8::2"),
		nodeOf("far", 2, "10.1.3.0/24 fd00:3::/64", "198.51.100.3 2001:db8:1::3"), nodeOf("nowhere", 3, "10.1.4.0/24", "203.0.113.4"),
		nodeOf("six", 4, "10.1.5.0/24 fd00:5::/64", "2001:db8::5"), nodeOf("four", 5, "10.1.6.0/24 fd00:6::/64", "192.0.2.6")}
	const own4, own6 = "unreachable 10.1.0.0/24 metric 32767", "unreachable fd00:1::/64 metric 32767"
	const near4, near6 = "10.1.2.0/24 via 192.0.2.2 dev 2", "fd00:2::/64 via 2001:db8::2 dev 2"
	const six4, six6, four4 = "10.1.5.0/24 via 2001:db8::5 dev 2", "fd00:5::/64 via 2001:db8::5 dev 2", "10.1.6.0/24 via 192.0.2.6 dev 2"
	for _, c := range []struct {
		way    OffLink
		routes []string
		far    State
		four6  State
		mtu    int
	}{
		{OffLinkRefuse, []string{own4, near4, six4, four4, own6, near6, six6}, Refused, Refused, 1500},
		{"", []string{own4, near4, six4, four4, own6, near6, six6}, Refused, Refused, 1500},
		{OffLinkFabric, []string{own4, near4, six4, four4, own6, near6, six6}, Fabric, Refused, 1500},
		{OffLinkVXLAN, []string{own4, near4, "10.1.3.0/24 via 169.254.130.94 dev 0 onlink", six4, four4, own6, near6,
			"fd00:3::/64 via fe80::e50:c633:6403 dev 0 onlink", six6, "fd00:6::/64 via fe80::e50:c000:206 dev 0 onlink"}, Tunneled, Tunneled, 1450},
	} {
		t.Run(string(c.way), func(t *testing.T) {
			want, peers, file := runPlan(t, Config{OffLink: c.way, VXLAN: VXLAN{142, 8472}}, nodes...)
			if diff := cmp.Diff(c.routes, want.routeTexts()); diff != "" {
				t.Error(diff)
			}
			states := map[string]State{}
			for _, p := range peers {
				states[p.Name+" "+p.PodCIDR.String()] = p.State
			}
			if diff := cmp.Diff(map[string]State{"near 10.1.2.0/24": Direct, "near fd00:2::/64": Direct, "far 10.1.3.0/24": c.far,
				"far fd00:3::/64": c.far, "nowhere 10.1.4.0/24": Refused, "six 10.1.5.0/24": Direct, "six fd00:5::/64": Direct,
				"four 10.1.6.0/24": Direct, "four fd00:6::/64": c.four6}, states); diff != "" {
				t.Error(diff)
			}
			if (want.Tunnel != nil) != (c.way == OffLinkVXLAN) || file.MTU != c.mtu {
				t.Errorf("tunnel %v, MTU %d, want %d", want.Tunnel, file.MTU, c.mtu)
			}
		})
	}
}

func TestReasons(t *testing.T) {
	for _, c := range []struct {
		way    OffLink
		node   Node
		reason string
	}{
		{OffLinkRefuse, nodeOf("a", 1, "10.1.2.0/24", "198.51.100.2"), "198.51.100.2 shares no link with this node, and offLink is refuse"},
		{OffLinkRefuse, nodeOf("a", 1, "10.1.2.0/24", "203.0.113.2"), "network is unreachable"},
		{OffLinkVXLAN, nodeOf("a", 1, "10.1.2.0/24", "203.0.113.2"), "network is unreachable"},
		{OffLinkVXLAN, nodeOf("a", 1, "10.1.2.0/24", "2001:db8:1::2"),
			"the node object has no IPv4 address, which is the family of the tunnel; addressCIDRs can choose another"},
	} {
		if _, peers, _ := runPlan(t, Config{OffLink: c.way}, self(), c.node); peers[0].Reason != c.reason || peers[0].State != Refused {
			t.Errorf("%s %v: %+v, want %q", c.way, c.node, peers[0], c.reason)
		}
	}
	for _, c := range []struct {
		node   Node
		noLink bool
	}{
		{nodeOf("a", 1, "10.1.2.0/24", "198.51.100.2"), true},
		{nodeOf("a", 1, "10.1.2.0/24", "203.0.113.2"), false},
	} {
		if _, peers, _ := runPlan(t, Config{OffLink: OffLinkRefuse}, self(), c.node); peers[0].NoLink != c.noLink {
			t.Errorf("%v: %+v, want NoLink %t", c.node, peers[0], c.noLink)
		}
	}
	lost := Peer{Name: "a", PodCIDR: netip.MustParsePrefix("10.1.2.0/24"), Gateway: netip.MustParseAddr("192.0.2.2")}
	_, peers, _ := Plan(Self{}, []Peer{lost}, nil, Config{})
	if peers[0].Reason != "the way to 192.0.2.2 is unknown" {
		t.Errorf("%+v", peers[0])
	}
}

func TestTunnel(t *testing.T) {
	cfg := Config{OffLink: OffLinkVXLAN, VXLAN: VXLAN{142, 8472}}
	want, _, file := runPlan(t, cfg, self(), nodeOf("b", 1, "10.1.3.0/24 fd00:3::/64", "198.51.100.3 2001:db8:1::3"),
		nodeOf("a", 2, "fd00:4::/64", "198.51.100.4"))
	addr := netip.MustParseAddr
	tunnel := &Tunnel{
		Addresses: []netip.Addr{addr("10.1.0.0"), addr("fd00:1::")},
		VXLAN: kernel.VXLAN{Name: "podlace.vx", VNI: 142, Port: 8472, Local: addr("192.0.2.1"),
			MAC: net.HardwareAddr{0x0e, 0x50, 192, 0, 2, 1}, MTU: 1450},
		Peers: []kernel.TunnelPeer{
			{MAC: net.HardwareAddr{0x0e, 0x50, 198, 51, 100, 3}, Remote: addr("198.51.100.3"),
				Hops: []netip.Addr{want.Nexthops[hopTo(want, "10.1.3.0/24")].Gateway, addr("fe80::e50:c633:6403")}},
			{MAC: net.HardwareAddr{0x0e, 0x50, 198, 51, 100, 4}, Remote: addr("198.51.100.4"), Hops: []netip.Addr{addr("fe80::e50:c633:6404")}},
		}}
	if diff := cmp.Diff(tunnel, want.Tunnel, same()); diff != "" || file.MTU != 1450 {
		t.Errorf("MTU %d\n%s", file.MTU, diff)
	}
	// With an IPv6 underlay, the device's MAC is a hash of the node's address.
	cfg.AddressCIDRs = []netip.Prefix{netip.MustParsePrefix("2001:db8::/32")}
	want, _, file = runPlan(t, cfg, self(), nodeOf("b", 1, "10.1.3.0/24", "198.51.100.3 2001:db8:1::3"))
	if file.MTU != 1430 || want.Tunnel.MTU != 1430 || want.Tunnel.MAC.String() != "0e:1e:03:d7:e1:ca" ||
		want.Tunnel.Local != addr("2001:db8::1") {
		t.Errorf("%+v, MTU %d", want.Tunnel, file.MTU)
	}
	// No peer needs the tunnel, so there is no device, but pods still have the link's MTU minus the overhead.
	if want, _, file = runPlan(t, cfg, self(), nodeOf("b", 1, "10.1.3.0/24", "2001:db8::3")); want.Tunnel != nil || file.MTU != 8930 {
		t.Errorf("%+v, MTU %d", want.Tunnel, file.MTU)
	}
}

func hopTo(w Wanted, cidr string) int {
	for _, r := range w.Routes {
		for i, h := range w.Nexthops {
			if r.Dst == netip.MustParsePrefix(cidr) && r.Nexthop == h.ID {
				return i
			}
		}
	}
	return -1
}

// TestMTU: pods have the configured MTU, or the smallest of the links to the peers. Without peers it is that of the link with the node's
// own address, or 0 if that is unknown.
func TestMTU(t *testing.T) {
	far := nodeOf("far", 1, "10.1.3.0/24", "198.51.100.3")
	near := nodeOf("near", 2, "10.1.2.0/24", "192.0.2.2")
	for _, c := range []struct {
		cfg   Config
		nodes []Node
		want  int
	}{{Config{}, nil, 0}, {Config{OffLink: OffLinkVXLAN}, nil, 0}, {Config{}, []Node{near}, 9000}, {Config{}, []Node{near, far}, 1500},
		{Config{OffLink: OffLinkFabric}, []Node{near, far}, 1500}, {Config{OffLink: OffLinkVXLAN}, []Node{near}, 8950},
		{Config{MTU: 1400, OffLink: OffLinkVXLAN}, []Node{near}, 1400}} {
		if _, _, file := runPlan(t, c.cfg, append(c.nodes, self())...); file.MTU != c.want {
			t.Errorf("%+v %v: %d, want %d", c.cfg, c.nodes, file.MTU, c.want)
		}
	}
	me, _, _ := Peers([]Node{self()}, Config{Self: "self"})
	ways := map[netip.Addr]Way{me.Addresses[0]: {Link: kernel.Link{Index: 2, Name: "eth0", MTU: 1500}}}
	if _, _, file := Plan(me, nil, ways, Config{OffLink: OffLinkVXLAN}); file.MTU != 1450 {
		t.Errorf("MTU %d of the link with the own address", file.MTU)
	}
}

func TestClusterCIDRs(t *testing.T) {
	nodes := []Node{nodeOf("self", 1, "10.1.0.0/24 fd00::/64", "192.0.2.1"),
		nodeOf("a", 1, "10.1.1.0/24 fd00:0:0:1::/64", "192.0.2.2 2001:db8::2"),
		nodeOf("b", 1, "10.1.2.0/24", "192.0.2.3"), nodeOf("c", 1, "10.1.3.0/24", "203.0.113.4"), nodeOf("d", 1, "10.1.5.0/24", "192.0.2.5"),
		nodeOf("e", 1, "10.1.6.0/24", "192.0.2.6"), nodeOf("lost", 2, "10.1.4.0/23", "192.0.2.7")}
	for i, c := range []struct {
		configured []string
		want       string
	}{
		{nil, "[10.1.0.0/22 10.1.5.0/24 10.1.6.0/24 fd00::/63]"},
		{[]string{"10.0.0.0/8", "10.1.0.0/16", "fd00::/16"}, "[10.0.0.0/8 fd00::/16]"},
	} {
		var cfg Config
		for _, s := range c.configured {
			cfg.ClusterCIDRs = append(cfg.ClusterCIDRs, netip.MustParsePrefix(s))
		}
		want, _, file := runPlan(t, cfg, nodes...)
		if got := fmt.Sprint(file.ClusterCIDRs); got != c.want || len(want.Advice) > 0 || fmt.Sprint(file.PodCIDRs) != "[10.1.0.0/24 fd00::/64]" {
			t.Errorf("%d: %s, want %s; %v; %v", i, got, c.want, want.Advice, file.PodCIDRs)
		}
	}
}

// TestManyClusterCIDRs: there are at most MaxClusterCIDRs, and an Advice if more are needed.
func TestManyClusterCIDRs(t *testing.T) {
	nodes := []Node{nodeOf("self", 1, "10.0.0.0/24", "192.0.2.1")}
	for i := 1; i <= nodefile.MaxClusterCIDRs; i++ {
		nodes = append(nodes, nodeOf(fmt.Sprint(i), 1, fmt.Sprintf("10.%d.%d.0/24", i>>7, i<<1&0xff), fmt.Sprintf("198.51.%d.%d", i>>8, i&0xff)))
		want, _, file := runPlan(t, Config{}, nodes...)
		if fits := i < nodefile.MaxClusterCIDRs; len(file.ClusterCIDRs) != min(i+1, nodefile.MaxClusterCIDRs) || (len(want.Advice) == 0) != fits {
			t.Fatalf("%d nodes: %d CIDRs, %v", i+1, len(file.ClusterCIDRs), want.Advice)
		}
	}
}

// TestCollisions: peers whose names have the same hash get different nexthop IDs and next hops, in any order of the peers.
func TestCollisions(t *testing.T) {
	byHash := map[uint32]string{}
	var names []string
	for i := 0; len(names) == 0; i++ {
		name, h := fmt.Sprint("node-", i), hash(fmt.Sprint("node-", i), true)%nexthops
		if other, ok := byHash[h]; ok {
			names = []string{other, name}
		}
		byHash[h] = name
	}
	nodes := []Node{self(), nodeOf(names[0], 1, "10.1.2.0/24", "198.51.100.2"), nodeOf(names[1], 2, "10.1.3.0/24", "198.51.100.3")}
	for i := range 1000 {
		address := fmt.Sprintf("198.51.%d.%d", 101+i>>8, i&0xff)
		nodes = append(nodes, nodeOf(fmt.Sprint("n", i), 3, fmt.Sprintf("10.2.%d.%d/28", i>>4, i<<4&0xff), address))
	}
	want, _, _ := runPlan(t, Config{OffLink: OffLinkVXLAN}, nodes...)
	ids, hops, stays := map[uint32]bool{}, map[netip.Addr]bool{}, 0
	for _, h := range want.Nexthops {
		ids[h.ID], hops[h.Gateway] = true, true
		if !netip.MustParsePrefix("169.254.0.0/16").Contains(h.Gateway) {
			t.Errorf("%+v", h)
		}
	}
	for name, cidr := range map[string]string{names[0]: "10.1.2.0/24", names[1]: "10.1.3.0/24"} {
		if want.Nexthops[hopTo(want, cidr)].ID == firstNexthop+hash(name, true)%nexthops {
			stays++
		}
	}
	if len(ids) != 1002 || len(hops) != 1002 || stays != 1 {
		t.Errorf("%d IDs and %d next hops of 1002; %d of the two has the ID of its hash", len(ids), len(hops), stays)
	}
}

// TestJoinMovesNothing: a new node never gets the nexthop ID or next hop of an existing one, even with the same hash, because it would
// receive the other's packets for a short time.
func TestJoinMovesNothing(t *testing.T) {
	for what, values := range map[string]uint32{"nexthop ID": nexthops, "next hop": hops4} {
		byHash := map[uint32]string{}
		var first, second string
		for i := 0; first == ""; i++ {
			name := fmt.Sprint("node-", i)
			h := hash(name, true) % values
			if other, ok := byHash[h]; ok {
				first, second = min(other, name), max(other, name)
			}
			byHash[h] = name
		}
		old := nodeOf(second, 1, "10.1.2.0/24", "198.51.100.2")
		before, _, _ := runPlan(t, Config{OffLink: OffLinkVXLAN}, self(), old)
		after, _, _ := runPlan(t, Config{OffLink: OffLinkVXLAN}, self(), old, nodeOf(first, 2, "10.1.3.0/24", "198.51.100.3"))
		was, is := before.Nexthops[hopTo(before, "10.1.2.0/24")], after.Nexthops[hopTo(after, "10.1.2.0/24")]
		if was != is || len(after.Nexthops) != 2 {
			t.Errorf("%s: %s joins beside %s, which had %s and has %s", what, first, second, was, is)
		}
	}
}

func TestHopCollision(t *testing.T) {
	tunnel := newTunneler(Self{})
	if a, b := tunnel.nextHop4("a"), tunnel.nextHop4("a"); a == b || !netip.MustParsePrefix("169.254.0.0/16").Contains(b) {
		t.Errorf("%s and %s", a, b)
	}
}
