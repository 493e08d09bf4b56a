// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
)

const (
	// The IDs of the agent's nexthop objects are firstNexthop to firstNexthop + nexthops - 1.
	firstNexthop = 0x50000000
	nexthops     = 1 << 28
	// ownMetric is the metric of the unreachable route to the node's own podCIDR. The bridge's connected route has a lower one, so it wins
	// while the bridge is up.
	ownMetric = 32767
)

// Plan returns the wanted kernel state, the peers with their states, and the content of node.json. self and peers come from Peers; ways has
// the route to each gateway and the link of each own address, whose MTU counts even without peers. The output is sorted and does not depend
// on the order of the input.
func Plan(self Self, peers []Peer, ways map[netip.Addr]Way, cfg Config) (Wanted, []Peer, nodefile.Node) {
	peers = slices.Clone(peers)
	slices.SortFunc(peers, byName)
	p := planner{cfg: cfg, ways: ways, ids: map[uint32]bool{}, tunnel: newTunneler(self)}
	node := nodefile.Node{PodCIDRs: self.PodCIDRs}
	for _, own := range self.PodCIDRs {
		p.want.Routes = append(p.want.Routes, kernel.ProtocolRoute{Dst: own, Metric: ownMetric})
	}
	cidrs := slices.Clone(self.PodCIDRs)
	uplink := 0
	for _, a := range self.Addresses {
		uplink = minMTU(uplink, ways[a])
	}
	for _, peer := range oldestFirst(peers) {
		if peer.State != "" || !peer.PodCIDR.IsValid() {
			continue
		}
		cidrs = append(cidrs, peer.PodCIDR)
		uplink = minMTU(uplink, ways[peer.Gateway])
		p.addPeer(peer)
	}
	node.MTU = cfg.podMTU(self, uplink)
	if len(p.tunnel.peers) > 0 {
		p.want.Tunnel = p.tunnel.device(cfg, self.PodCIDRs, uplink)
	}
	p.want.Advice = append(adviseSelf(self, peers, cfg.Self), adviseMTU(cfg, self, uplink)...)
	var advice []Advice
	node.ClusterCIDRs, advice = clusterCIDRs(cfg.ClusterCIDRs, cidrs)
	p.want.Advice = append(p.want.Advice, advice...)
	slices.SortFunc(p.want.Nexthops, func(a, b kernel.Nexthop) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(p.want.Routes, func(a, b kernel.ProtocolRoute) int { return a.Dst.Compare(b.Dst) })
	return p.want, peers, node
}

// oldestFirst returns the peers in the order in which they get IDs and next hops, so an older node keeps its ID when a newer one with the
// same hash joins.
func oldestFirst(peers []Peer) (list []*Peer) {
	for i := range peers {
		list = append(list, &peers[i])
	}
	slices.SortStableFunc(list, func(a, b *Peer) int { return cmp.Compare(a.Age, b.Age) })
	return list
}

// minMTU returns the smaller of mtu and the MTU of the way's link; 0 does not count.
func minMTU(mtu int, way Way) int {
	if way.MTU == 0 || way.Name == "lo" || mtu != 0 && mtu < way.MTU {
		return mtu
	}
	return way.MTU
}

type planner struct {
	cfg    Config
	ways   map[netip.Addr]Way
	ids    map[uint32]bool // used IDs of nexthop objects
	tunnel *tunneler
	want   Wanted
}

// addPeer stores a peer's State, and its route in the wanted state if this node can reach it.
func (p *planner) addPeer(peer *Peer) {
	way, known := p.ways[peer.Gateway]
	mixed := peer.PodCIDR.Addr().Is6() && peer.Gateway.Is4() // only the tunnel carries IPv6 over IPv4
	if known && way.Reason == "" && way.OnLink && !mixed {
		peer.State = Direct
		p.addRoute(peer, kernel.Nexthop{Gateway: peer.Gateway, Link: way.Index})
		return
	}
	unreachable := !known || way.Reason != ""
	switch {
	case unreachable && (p.cfg.OffLink != OffLinkVXLAN || peer.Underlay == peer.Gateway):
		peer.State, peer.Reason = Refused, cmp.Or(way.Reason, fmt.Sprintf("the way to %s is unknown", peer.Gateway))
	case p.cfg.OffLink == OffLinkFabric:
		peer.State = Fabric
	case p.cfg.OffLink == OffLinkVXLAN:
		hop, reason := p.tunnel.addPeer(*peer)
		if peer.Reason = reason; reason != "" {
			peer.State = Refused
			return
		}
		peer.State = Tunneled
		p.addRoute(peer, kernel.Nexthop{Gateway: hop, Link: TunnelLink, OnLink: true})
	default:
		peer.State, peer.NoLink = Refused, true
		peer.Reason = fmt.Sprintf("%s shares no link with this node, and offLink is refuse", peer.Gateway)
	}
}

// addRoute adds a route with its nexthop object. The object's ID is a hash of the peer's name and the family, so it does not change when
// other peers join or leave.
func (p *planner) addRoute(peer *Peer, hop kernel.Nexthop) {
	id := hash(peer.Name, peer.PodCIDR.Addr().Is4()) % nexthops
	for p.ids[id] {
		id = (id + 1) % nexthops
	}
	p.ids[id] = true
	hop.ID = firstNexthop + id
	p.want.Nexthops = append(p.want.Nexthops, hop)
	p.want.Routes = append(p.want.Routes, kernel.ProtocolRoute{Dst: peer.PodCIDR, Nexthop: hop.ID})
}

func hash(name string, is4 bool) uint32 {
	h := fnv.New32a()
	h.Write([]byte(name))
	if is4 {
		h.Write([]byte{4})
	}
	return h.Sum32()
}

// podMTU returns the MTU of pods, or 0 if unknown: the configured one, or the uplink's minus the overhead of a configured tunnel. The
// overhead counts even if no peer needs the tunnel yet, because one may come later and running pods keep their MTU.
func (c Config) podMTU(self Self, uplink int) int {
	if c.MTU != 0 {
		return c.MTU
	}
	if c.OffLink == OffLinkVXLAN {
		uplink -= overhead(self.Underlay())
	}
	return min(max(0, uplink), maxMTU)
}

// maxMTU is the size of the largest IP packet in bytes (the kernel's IP_MAX_MTU), which a loopback device's MTU can exceed.
const maxMTU = 65535
