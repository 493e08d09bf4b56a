// SPDX-License-Identifier: Apache-2.0

// Package noderoutes computes what the kernel of a node shall have so that its pods reach those of the other nodes, and makes it so. Peers
// and Wanted are pure; Apply compares with the kernel and changes the difference. Everything that it makes carries Protocol, and nothing
// else is ever changed or removed.
package noderoutes

import (
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// Protocol marks every route, nexthop and neighbour of the agent (rtm_protocol; 142 is taken by no program in iproute2's rt_protos).
const Protocol = 142

// Node is what is read of a node object of Kubernetes, as it stands there: nothing is checked yet.
type Node struct {
	Name    string
	UID     string
	Created time.Time // metadata.creationTimestamp
	// PodCIDRs is spec.podCIDRs, Addresses each status.addresses[].address of type InternalIP, in the order of the object.
	PodCIDRs  []string
	Addresses []string
}

// OffLink says what is done for nodes that share no link with this one.
type OffLink string

// The ways to a node on another link.
const (
	OffLinkRefuse OffLink = "refuse" // no route; the state of the peer tells
	OffLinkVXLAN  OffLink = "vxlan"  // through a tunnel
	OffLinkFabric OffLink = "fabric" // no route: a router or the cloud has it
)

// Config is what the plan depends on beside the nodes.
type Config struct {
	Self         string // the name of this node
	OffLink      OffLink
	AddressCIDRs []netip.Prefix // addresses of nodes are taken from these alone; empty: from all
	ClusterCIDRs []netip.Prefix // the CIDRs of all pods; empty: computed from all nodes
	MTU          int            // of pods, in bytes; 0: from the links that lead to the peers
	VXLAN        VXLAN
	// Connected are the subnets of the addresses on the links of this node; no peer's podCIDR may overlap one. Subnets that overlap the
	// node's own podCIDRs, such as that of cni0, are ignored. Subnets of routes to peers must not be among them.
	Connected []netip.Prefix
}

// VXLAN describes the tunnel device.
type VXLAN struct {
	VNI  int // 1 to 16777215
	Port int // UDP, 1 to 65535
}

// State tells how the pods of a peer are reached.
type State string

// The states of a peer's podCIDR.
const (
	Direct   State = "direct"   // by a route to the peer, which shares a link with this node
	Tunneled State = "vxlan"    // through the tunnel
	Fabric   State = "fabric"   // by the routers outside
	Refused  State = "refused"  // the node object cannot be used, or nothing leads to the peer: Reason says why
	Conflict State = "conflict" // another node, or a route of another program, has the podCIDR: Reason names it
	Failed   State = "failed"   // the kernel refused a change, which is tried again: Reason says why
)

// Peer is a podCIDR of another node, and the address that leads there. Where a node object cannot be used, a Peer without PodCIDR says why.
type Peer struct {
	Name    string
	PodCIDR netip.Prefix
	Gateway netip.Addr // the peer's address: of the same family as PodCIDR where it has one
	// Underlay is the peer's address of the tunnel's family, with OffLinkVXLAN.
	Underlay netip.Addr
	Age      int   // the place of its node among all, the oldest first
	State    State // empty until the way is known
	Reason   string
	// Elder says that the peer is older than this node and has its podCIDR: all other nodes send to the peer.
	Elder bool
}

// Self is what the node's own object says, checked.
type Self struct {
	PodCIDRs  []netip.Prefix // at most one of each family
	Addresses []netip.Addr   // at most one of each family
}

// Underlay returns the own address of the tunnel. All pods have one underlay: IPv4 where the node has an IPv4 address.
func (s Self) Underlay() netip.Addr {
	for _, a := range s.Addresses {
		return a
	}
	return netip.Addr{}
}

// Way is how this node reaches the address of a peer now.
type Way struct {
	kernel.Link
	OnLink bool   // without a gateway
	Reason string // why there is no way; then Link is zero, but for an address of this node
}

// Wanted is all that the kernel of this node shall have for its peers.
type Wanted struct {
	Nexthops []kernel.Nexthop
	Routes   []kernel.ProtocolRoute
	Tunnel   *Tunnel  // nil: none
	Advice   []Advice // what is wrong with the configuration or this node's object
}

// Advice says what an administrator should correct.
type Advice struct {
	What, Why, Do string
	Hold          bool // no pod can work here: a node that has none yet gets no node.json
}

// TunnelLink stands in Nexthop.Link for the tunnel, whose ifindex is known only once it is there.
const TunnelLink = 0

// Tunnel is a VXLAN device without learning, with static entries for its peers.
type Tunnel struct {
	kernel.VXLAN
	// Addresses are of the node's own podCIDRs: the kernel takes them for the node's own packets through the tunnel, so that the answers
	// come through the tunnel, too.
	Addresses []netip.Addr
	Peers     []kernel.TunnelPeer
}

// Result is what Apply did and could not do.
type Result struct {
	Changes   int                     // of the kernel
	Had       int                     // routes with Protocol that were there before
	Unwanted  int                     // of those, how many Wanted lacks
	Has       map[bool]int            // routes with Protocol that are there now, of IPv4 (true) and of IPv6
	Kept      int                     // deletions that Options.Keep held back: of routes, nexthops, neighbours, the tunnel
	Failed    map[netip.Prefix]error  // routes that the kernel refused
	Other     error                   // what else the kernel refused: the tunnel, a deletion
	Conflicts map[netip.Prefix]string // routes of other programs to the same podCIDR, as ip-route(8) prints them
	Inside    map[netip.Prefix]string // with Options.Inside: routes of other programs to a part of the podCIDR
}
