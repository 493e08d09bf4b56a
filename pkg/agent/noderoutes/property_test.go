// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
)

// randomNodes returns random Node objects, many of them with the same podCIDRs and addresses.
func randomNodes(r *rand.Rand) (nodes []Node) {
	cidrs := []string{"10.1.0.0/24", "10.1.1.0/24", "10.1.0.0/23", "10.1.0.0/25", "10.0.0.0/8", "fd00::/64", "fd00:0:0:1::/64", "fd00::/56",
		"192.0.2.0/28", "x", "::/0", "10.1.7.0/24", "10.1.8.0/24", "10.1.9.0/24"}
	addresses := []string{"192.0.2.1", "192.0.2.2", "192.0.2.3", "198.51.100.1", "198.51.100.2", "2001:db8::1", "2001:db8::2", "2001:db8:1::1",
		"203.0.113.1", "10.1.9.9", "::1", "y"}
	some := func(from []string) (list []string) {
		for range r.IntN(4) {
			list = append(list, from[r.IntN(len(from))])
		}
		return list
	}
	nodes = append(nodes, nodeOf("n0", 1+r.IntN(3), cidrs[r.IntN(7)], addresses[r.IntN(6)]))
	for i := range 1 + r.IntN(12) {
		name := fmt.Sprint("n", i+1)
		nodes = append(nodes, nodeOf(name, 1+r.IntN(3), strings.Join(some(cidrs), " "), strings.Join(some(addresses), " ")))
	}
	return nodes
}

// TestOrder: the results of Peers and Plan do not depend on the order of nodes and peers.
func TestOrder(t *testing.T) {
	usable := 0
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 0))
		nodes := randomNodes(r)
		cfg := Config{Self: nodes[0].Name, OffLink: []OffLink{OffLinkRefuse, OffLinkVXLAN, OffLinkFabric}[seed%3]}
		first := runAndCheck(t, nodes, cfg)
		if len(first.Wanted.Routes) > 1 {
			usable++
		}
		r.Shuffle(len(nodes), func(i, k int) { nodes[i], nodes[k] = nodes[k], nodes[i] })
		if diff := cmp.Diff(first, runAndCheck(t, nodes, cfg), same()); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
	}
	if usable < 500 {
		t.Errorf("only %d cases have routes to peers", usable)
	}
}

type result struct {
	Wanted Wanted
	Peers  []Peer
	File   nodefile.Node
	Err    string
}

func runAndCheck(t *testing.T, nodes []Node, cfg Config) result {
	t.Helper()
	me, peers, err := Peers(nodes, cfg)
	if err != nil {
		return result{Err: err.Error()}
	}
	ways := waysOf(me, peers)
	turned := slices.Clone(peers)
	slices.Reverse(turned)
	want, planned, file := Plan(me, turned, ways, cfg)
	mustBeSound(t, nodes, want, planned, me)
	mustCover(t, want, peers, file)
	return result{want, planned, file, ""}
}

// mustBeSound: each peer has a state, each accepted podCIDR exactly one route, and none contains the address of a node.
func mustBeSound(t *testing.T, nodes []Node, want Wanted, peers []Peer, me Self) {
	t.Helper()
	allowed := map[netip.Prefix]bool{}
	for _, p := range peers {
		switch p.State {
		case Direct, Tunneled:
			allowed[p.PodCIDR] = true
			if !slices.ContainsFunc(nodes, func(n Node) bool { return n.Name == p.Name && slices.Contains(n.PodCIDRs, p.PodCIDR.String()) }) {
				t.Errorf("%+v has another's podCIDR", p)
			}
			fallthrough
		case Fabric:
			if p.Reason != "" || !p.Gateway.IsValid() {
				t.Errorf("%+v", p)
			}
		case Refused, Conflict:
			if p.Reason == "" {
				t.Errorf("no reason: %+v", p)
			}
		default:
			t.Errorf("no state: %+v", p)
		}
	}
	hops := map[uint32]bool{}
	for _, h := range want.Nexthops {
		if hops[h.ID] || h.ID>>28 != 5 || !h.Gateway.IsValid() || h.OnLink != (h.Link == TunnelLink) {
			t.Errorf("%+v", h)
		}
		hops[h.ID] = true
	}
	for i, r := range want.Routes {
		if own := slices.Contains(me.PodCIDRs, r.Dst); own != (r.Nexthop == 0) || own != (r.Metric == 32767) ||
			!own && (!allowed[r.Dst] || !hops[r.Nexthop]) {
			t.Errorf("%+v", r)
		}
		delete(hops, r.Nexthop)
		if i > 0 && want.Routes[i-1].Dst.Overlaps(r.Dst) {
			t.Errorf("%s and %s overlap", want.Routes[i-1].Dst, r.Dst)
		}
		for _, p := range append(slices.Clone(peers), Peer{Gateway: me.Addresses[0], Underlay: me.Addresses[len(me.Addresses)-1]}) {
			if r.Nexthop != 0 && (r.Dst.Contains(p.Gateway) || r.Dst.Contains(p.Underlay)) {
				t.Errorf("%s holds a node", r.Dst)
			}
		}
	}
	if len(hops) > 0 {
		t.Errorf("nexthops without a route: %v", hops)
	}
}

// mustCover: the cluster CIDRs contain the addresses of the accepted podCIDRs and no others.
func mustCover(t *testing.T, want Wanted, accepted []Peer, file nodefile.Node) {
	t.Helper()
	sum := func(cidrs []netip.Prefix) *big.Int {
		n := new(big.Int)
		for _, p := range cidrs {
			n.Add(n, new(big.Int).Lsh(big.NewInt(1), uint(p.Addr().BitLen()-p.Bits())))
		}
		return n
	}
	all := slices.Clone(file.PodCIDRs)
	for _, p := range accepted {
		if p.State == "" {
			all = append(all, p.PodCIDR)
		}
	}
	for _, p := range all {
		holds := func(c netip.Prefix) bool { return c.Overlaps(p) && c.Bits() <= p.Bits() }
		if !slices.ContainsFunc(file.ClusterCIDRs, holds) && len(want.Advice) == 0 {
			t.Errorf("%s is not in %v", p, file.ClusterCIDRs)
		}
	}
	if sum(all).Cmp(sum(file.ClusterCIDRs)) != 0 && len(want.Advice) == 0 {
		t.Errorf("%v for %v", file.ClusterCIDRs, all)
	}
}

// FuzzPlan checks the invariants of Peers and Plan. A line of the input is one node: name, creation time in seconds, podCIDRs, addresses.
func FuzzPlan(f *testing.F) {
	for _, seed := range []string{"", "self|1|10.1.0.0/24,fd00::/64|192.0.2.1,2001:db8::1\na|2|10.1.1.0/24|192.0.2.2",
		"self|1|10.1.0.0/24|192.0.2.1\na|2|10.1.0.0/16|198.51.100.2\nb|1|10.1.2.0/23|2001:db8::1\nc|1|10.1.3.0/24|2001:db8::2",
		"self|1|fd00::/64|2001:db8::1\na|2|fd00:0:0:1::/64|::ffff:1.2.3.4,fe80::1%a\nb|1|::/0,0.0.0.0/0,10.0.0.0/32|\nself||x|y",
		"self|1|10.1.0.0/24|192.0.2.1\na|1|128.0.0.0/1|192.0.2.2\nb|1|192.0.2.0/30|192.0.2.3\nc|1|10.1.0.0/25|192.0.2.3"} {
		for way := range uint8(4) {
			f.Add(seed, way)
		}
	}
	f.Fuzz(func(t *testing.T, text string, way uint8) {
		nodes := []Node(nil)
		for line := range strings.SplitSeq(text, "\n") {
			fields := append(strings.Split(line, "|"), "", "", "")
			nodes = append(nodes, Node{Name: fields[0], Created: time.Unix(int64(len(fields[1])), 0), UID: fields[1],
				PodCIDRs: strings.Split(fields[2], ","), Addresses: strings.Split(fields[3], ",")})
		}
		cfg := Config{Self: "self", OffLink: []OffLink{"", OffLinkRefuse, OffLinkVXLAN, OffLinkFabric}[way%4]}
		first := runAndCheck(t, nodes, cfg)
		slices.Reverse(nodes)
		if diff := cmp.Diff(first, runAndCheck(t, nodes, cfg), same()); diff != "" {
			t.Error(diff)
		}
	})
}

// BenchmarkPlan measures Peers and Plan for 5,000 nodes with both families, without and with the tunnel.
func BenchmarkPlan(b *testing.B) {
	var nodes []Node
	for i := range 5000 {
		nodes = append(nodes, nodeOf(fmt.Sprint("n", i), 1+i%28, fmt.Sprintf("10.%d.%d.0/24 fd00:0:0:%x::/64", i>>8, i&0xff, i),
			fmt.Sprintf("172.16.%d.%d 2001:db8::%x", i>>8, i&0xff, i+1)))
	}
	for _, way := range []OffLink{OffLinkRefuse, OffLinkVXLAN} {
		b.Run(string(way), func(b *testing.B) {
			cfg := Config{Self: "n0", OffLink: way}
			_, peers, _ := Peers(nodes, cfg)
			ways := map[netip.Addr]Way{}
			for _, p := range peers {
				ways[p.Gateway] = Way{Link: kernel.Link{Index: 2, MTU: 1500}, OnLink: way == OffLinkRefuse}
			}
			for b.Loop() {
				me, peers, err := Peers(nodes, cfg)
				want, _, _ := Plan(me, peers, ways, cfg)
				if err != nil || len(want.Routes) != 10000 {
					b.Fatal(len(want.Routes), err)
				}
			}
		})
	}
}
