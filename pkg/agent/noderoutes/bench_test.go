// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
)

// bigNode is a node with many peers of two podCIDRs each, and its wanted state.
type bigNode struct {
	labNode
	peers    int
	gateways []netip.Addr
	want     Wanted
}

func newBig(b *testing.B, peers int, tunnel bool) bigNode {
	b.Helper()
	n := bigNode{labNode: newNode(b), peers: peers}
	n.runInside(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"})
	})
	n.runInside(func() error {
		return errors.Join(netlink.LinkSetUp(mustLink("eth0")), netlink.LinkSetUp(mustLink("eth1")), addAddress("eth0", "172.16.0.1/12"),
			addAddress("eth0", "fd00:2::1/64"))
	})
	link := n.linkOf("eth0").Index
	if tunnel {
		n.want.Tunnel = &Tunnel{VXLAN: kernel.VXLAN{Name: "podlace.vx", VNI: 142, Port: 8472, Local: netip.MustParseAddr("172.16.0.1"),
			MAC: net.HardwareAddr{0x0e, 0x50, 172, 16, 0, 1}, MTU: 1450}}
	}
	for id := 2; id < 2+peers; id++ {
		four := netip.AddrFrom4([4]byte{172, 16 + byte(id>>16), byte(id >> 8), byte(id)})
		six := netip.MustParseAddr(fmt.Sprintf("fd00:2::%x", id))
		n.gateways = append(n.gateways, four, six)
		via := []netip.Addr{four, six}
		if tunnel {
			via = []netip.Addr{netip.AddrFrom4([4]byte{169, 254, byte(id >> 8), byte(id)}), netip.MustParseAddr(fmt.Sprintf("fe80::50:%x", id))}
			n.want.Tunnel.Peers = append(n.want.Tunnel.Peers,
				kernel.TunnelPeer{MAC: net.HardwareAddr{0x0e, 0x50, 172, 16, byte(id >> 8), byte(id)}, Remote: four, Hops: via})
		}
		for i, v6 := range []bool{false, true} {
			hop := kernel.Nexthop{ID: nexthopID(id, v6), Gateway: via[i], Link: link}
			if tunnel {
				hop.Link, hop.OnLink = TunnelLink, true
			}
			n.want.Nexthops = append(n.want.Nexthops, hop)
			n.want.Routes = append(n.want.Routes, kernel.ProtocolRoute{Dst: cidrOf(id, v6), Nexthop: hop.ID})
		}
	}
	return n
}

// BenchmarkApply measures the start of a node (Ways and Apply), an Apply without changes, and one after a peer changed its addresses. All
// peers have both families.
func BenchmarkApply(b *testing.B) {
	for _, peers := range []int{1000, 5000} {
		for _, tunnel := range []bool{false, true} {
			way := map[bool]string{false: "direct", true: "vxlan"}[tunnel]
			b.Run(fmt.Sprintf("%d/%s", peers, way), func(b *testing.B) { benchmark(b, newBig(b, peers, tunnel)) })
		}
	}
}

func benchmark(b *testing.B, n bigNode) {
	b.Run("start", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			_, err := Remove(n.ns)
			kerneltest.Must(b, err)
			b.StartTimer()
			Ways(n.ns, n.gateways)
			if r := n.mustApply(n.want, Options{}); r.Changes < 4*n.peers {
				b.Fatalf("%+v", r)
			}
		}
	})
	b.Run("ways", func(b *testing.B) {
		for b.Loop() {
			if ways := Ways(n.ns, n.gateways); !ways[n.gateways[0]].OnLink {
				b.Fatal(ways[n.gateways[0]])
			}
		}
	})
	n.mustApply(n.want, Options{})
	b.Run("same", func(b *testing.B) {
		for b.Loop() {
			if r := n.mustApply(n.want, Options{}); r.Changes != 0 {
				b.Fatalf("%+v", r)
			}
		}
	})
	b.Run("one changed", func(b *testing.B) {
		moved := n.want
		moved.Nexthops = slices.Clone(moved.Nexthops)
		moved.Nexthops[0].Gateway = netip.MustParseAddr("172.31.0.1")
		if moved.Tunnel != nil {
			tunnel := *moved.Tunnel
			tunnel.Peers = slices.Clone(tunnel.Peers)
			tunnel.Peers[0].Remote = moved.Nexthops[0].Gateway
			moved.Tunnel, moved.Nexthops = &tunnel, n.want.Nexthops
		}
		for round := 0; b.Loop(); round++ {
			if r := n.mustApply([]Wanted{moved, n.want}[round%2], Options{}); r.Changes != 1 {
				b.Fatalf("%+v", r)
			}
		}
	})
	b.Run("remove", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			n.mustApply(n.want, Options{})
			b.StartTimer()
			_, err := Remove(n.ns)
			kerneltest.Must(b, err)
		}
	})
}
