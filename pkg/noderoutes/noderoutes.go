// SPDX-License-Identifier: Apache-2.0

// Package noderoutes computes and applies the kernel state that connects the pods of a node with the pods of other nodes. Peers and Plan
// compute the wanted state without I/O. Apply compares the wanted state with the kernel and makes the necessary changes. Every object that
// Apply creates has the route protocol Protocol. Apply does not change or delete objects of other programs, except routes that
// Options.Adopt names.
package noderoutes

import (
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// Protocol is the protocol number of every route, nexthop object and neighbour of the agent (rtm_protocol). No other program in iproute2's
// rt_protos uses 142.
const Protocol = 142

// Node holds fields of a Kubernetes Node object that are not yet validated.
type Node struct {
	Name    string
	UID     string
	Created time.Time // metadata.creationTimestamp
	// PodCIDRs is spec.podCIDRs. Addresses lists the node's addresses of type InternalIP in the order of status.addresses.
	PodCIDRs  []string
	Addresses []string
}

// OffLink selects how this node reaches the pods of nodes that are not on a link of this node.
type OffLink string

// Values of OffLink.
const (
	OffLinkRefuse OffLink = "refuse" // no route; the state of the peer says so
	OffLinkVXLAN  OffLink = "vxlan"  // through a tunnel
	OffLinkFabric OffLink = "fabric" // no route: a router or the cloud has one
)

// Config is the configuration of Peers and Plan.
type Config struct {
	Self         string // name of this node
	OffLink      OffLink
	AddressCIDRs []netip.Prefix // only addresses in these are used; empty: all
	ClusterCIDRs []netip.Prefix // CIDRs of all pods; empty: computed from all nodes
	MTU          int            // of pods, in bytes; 0: from the links to the peers
	VXLAN        VXLAN
	// Connected lists the subnets of this node's links. The podCIDR of a peer must not overlap these subnets. Subnets that overlap the node's
	// own podCIDRs, such as the subnet of cni0, are ignored. Connected must not contain destinations of routes to peers.
	Connected []netip.Prefix
}

// VXLAN describes the tunnel device.
type VXLAN struct {
	VNI  int `json:"vni"`  // 1 to 16777215
	Port int `json:"port"` // UDP, 1 to 65535
}

// State is the state of a peer's podCIDR: how its pods are reached, or why they are not reached.
type State string

// Values of State.
const (
	Direct   State = "direct"   // by a route to the peer, which shares a link with this node
	Tunneled State = "vxlan"    // through the tunnel
	Fabric   State = "fabric"   // by external routers
	Refused  State = "refused"  // the node object is invalid, or no route leads to the peer: see Reason
	Conflict State = "conflict" // another node, or a route of another program, has the podCIDR: see Reason
	Failed   State = "failed"   // the kernel refused a change, which is retried: see Reason
)

// Peer is a podCIDR of another node with the address of that node. For an invalid node object, Peer has no PodCIDR, and Reason describes
// the error.
type Peer struct {
	Name    string
	PodCIDR netip.Prefix
	Gateway netip.Addr // address of the peer, of the podCIDR's family if it has one
	// Underlay is the address of the peer in the address family of the tunnel. It is set only with OffLinkVXLAN.
	Underlay netip.Addr
	Age      int   // index of its node among all, oldest first
	State    State // empty until Plan sets it
	Reason   string
	// Elder is true if the peer is older than this node and its podCIDR overlaps a podCIDR of this node. In this case all other nodes send
	// packets for the overlapping addresses to the peer.
	Elder bool
	// NoLink is true if the State is Refused because the peer shares no link with this node and OffLink is OffLinkRefuse.
	NoLink bool
}

// Self is the validated content of this node's own Node object.
type Self struct {
	PodCIDRs  []netip.Prefix // at most one of each family
	Addresses []netip.Addr   // at most one of each family
}

// Underlay returns this node's address for the tunnel. This is the node's IPv4 address if the node has an IPv4 address. All nodes of a
// cluster must use the same family for the tunnel.
func (s Self) Underlay() netip.Addr {
	for _, a := range s.Addresses {
		return a
	}
	return netip.Addr{}
}

// Way is the current route from this node to the address of a peer.
type Way struct {
	kernel.Link
	OnLink bool   // without a gateway
	Reason string // why there is no way; Link is then zero, except for an address of this node
}

// Wanted is the wanted kernel state of this node.
type Wanted struct {
	Nexthops []kernel.Nexthop
	Routes   []kernel.ProtocolRoute
	Tunnel   *Tunnel  // nil: none
	Advice   []Advice // errors in the configuration or in this node's object
}

// Advice describes an error that an administrator should correct. The field What names the part with the error. The field Why contains the
// reason, and the field Do contains the remedy.
type Advice struct {
	What, Why, Do string
	BlocksPods    bool // no pod can work here: a node without node.json gets none
}

// TunnelLink is the value of Nexthop.Link for nexthop objects through the tunnel, because the ifindex of the tunnel is unknown before
// Apply.
const TunnelLink = 0

// Tunnel is the wanted VXLAN device. The device learns no addresses, because its entries for the peers are static.
type Tunnel struct {
	kernel.VXLAN
	// Addresses contains the tunnel device's addresses, which are in the node's own podCIDRs. The kernel uses them as source addresses of the
	// node's own packets through the tunnel, so that the replies also use the tunnel.
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
