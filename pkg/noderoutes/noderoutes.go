// SPDX-License-Identifier: Apache-2.0

// Package noderoutes computes and applies the kernel state that connects the pods of a node with those of the other nodes. Peers and
// Plan do no I/O; Apply compares with the kernel and changes what differs. Every object that it makes carries Protocol. It never
// changes or removes another object.
package noderoutes

import (
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// Protocol marks every route, nexthop and neighbour of the agent (rtm_protocol; no program in iproute2's rt_protos uses 142).
const Protocol = 142

// Node has the unchecked fields of a Kubernetes Node object.
type Node struct {
	Name    string
	UID     string
	Created time.Time // metadata.creationTimestamp
	// PodCIDRs is spec.podCIDRs, Addresses each status.addresses[].address of type InternalIP, in the order of the object.
	PodCIDRs  []string
	Addresses []string
}

// OffLink is the way to nodes that share no link with this one.
type OffLink string

// Values of OffLink.
const (
	OffLinkRefuse OffLink = "refuse" // no route; the state of the peer says so
	OffLinkVXLAN  OffLink = "vxlan"  // through a tunnel
	OffLinkFabric OffLink = "fabric" // no route: a router or the cloud has one
)

// Config is the input of the plan besides the nodes.
type Config struct {
	Self         string // name of this node
	OffLink      OffLink
	AddressCIDRs []netip.Prefix // only addresses in these are used; empty: all
	ClusterCIDRs []netip.Prefix // CIDRs of all pods; empty: computed from all nodes
	MTU          int            // of pods, in bytes; 0: from the links to the peers
	VXLAN        VXLAN
	// Connected are the subnets of this node's links; no peer's podCIDR may overlap one. Subnets that overlap the node's own podCIDRs,
	// such as that of cni0, are ignored. Subnets of routes to peers must not be among them.
	Connected []netip.Prefix
}

// VXLAN describes the tunnel device.
type VXLAN struct {
	VNI  int `json:"vni"`  // 1 to 16777215
	Port int `json:"port"` // UDP, 1 to 65535
}

// State is the way in which the pods of a peer are reached.
type State string

// The states of a peer's podCIDR.
const (
	Direct   State = "direct"   // by a route to the peer, which shares a link with this node
	Tunneled State = "vxlan"    // through the tunnel
	Fabric   State = "fabric"   // by external routers
	Refused  State = "refused"  // the node object is invalid, or no route leads to the peer: see Reason
	Conflict State = "conflict" // another node, or a route of another program, has the podCIDR: see Reason
	Failed   State = "failed"   // the kernel refused a change, which is retried: see Reason
)

// Peer is a podCIDR of another node, and the address that leads there. An invalid node object gives a Peer without PodCIDR and with a
// Reason.
type Peer struct {
	Name    string
	PodCIDR netip.Prefix
	Gateway netip.Addr // address of the peer, of the podCIDR's family if it has one
	// Underlay is the peer's address of the tunnel's family, with OffLinkVXLAN.
	Underlay netip.Addr
	Age      int   // index of its node among all, oldest first
	State    State // empty until Plan sets it
	Reason   string
	// Elder is set if the peer is older than this node and has its podCIDR: all other nodes send to the peer.
	Elder bool
}

// Self is the checked content of the node's own object.
type Self struct {
	PodCIDRs  []netip.Prefix // at most one of each family
	Addresses []netip.Addr   // at most one of each family
}

// Underlay returns the own address of the tunnel. The whole cluster uses one family: IPv4 if the node has an IPv4 address.
func (s Self) Underlay() netip.Addr {
	for _, a := range s.Addresses {
		return a
	}
	return netip.Addr{}
}

// Way is how this node reaches the address of a peer at present.
type Way struct {
	kernel.Link
	OnLink bool   // without a gateway
	Reason string // why there is no way; Link is then zero, except for an address of this node
}

// Wanted is the wanted kernel state of this node for its peers.
type Wanted struct {
	Nexthops []kernel.Nexthop
	Routes   []kernel.ProtocolRoute
	Tunnel   *Tunnel  // nil: none
	Advice   []Advice // errors in the configuration or in this node's object
}

// Advice is an error that an administrator should correct.
type Advice struct {
	What, Why, Do string
	BlocksPods    bool // no pod can work here: a node without node.json gets none
}

// TunnelLink stands for the tunnel in Nexthop.Link, because its ifindex is unknown until it exists.
const TunnelLink = 0

// Tunnel is a VXLAN device without learning, with static entries for its peers.
type Tunnel struct {
	kernel.VXLAN
	// Addresses are of the node's own podCIDRs. The kernel uses them as the source of the node's own packets through the tunnel, so
	// that the replies also use the tunnel.
	Addresses []netip.Addr
	Peers     []kernel.TunnelPeer
}

// Result is the outcome of Apply.
type Result struct {
	Changes   int                     // number of changes in the kernel
	Had       int                     // number of routes with Protocol before
	Unwanted  int                     // how many of those Wanted lacks
	Has       map[bool]int            // number of routes with Protocol afterwards; true is IPv4
	Kept      int                     // number of deletions that Options.Keep held back: of routes, nexthops, neighbours, the tunnel
	Failed    map[netip.Prefix]error  // routes that the kernel refused
	Other     error                   // other refused changes: the tunnel, a deletion
	Conflicts map[netip.Prefix]string // routes of other programs to the same podCIDR, as ip-route(8) prints them
	Inside    map[netip.Prefix]string // with Options.Inside: routes of other programs to a part of the podCIDR
}
