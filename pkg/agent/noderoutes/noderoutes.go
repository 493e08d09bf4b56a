// SPDX-License-Identifier: Apache-2.0

// Package noderoutes computes and applies the kernel state that connects the pods of a node with the pods of other nodes. Peers and Plan
// compute the wanted state without I/O. Apply compares the wanted state with the kernel and makes the necessary changes. Every object that
// Apply creates has the route protocol Protocol. Apply does not change or delete objects of other programs, except routes that
// Options.Adopt selects.
package noderoutes

import (
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// Protocol is the protocol number of every route, nexthop object and neighbour of the agent (rtm_protocol). The number 142 is not used in
// rt_protos of iproute2.
const Protocol = 142

// Node holds fields of a Kubernetes Node object. The fields of Node are not yet validated.
type Node struct {
	Name    string
	UID     string
	Created time.Time // metadata.creationTimestamp
	// PodCIDRs is spec.podCIDRs. Addresses contains the node's addresses of type InternalIP in the order of status.addresses.
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
	// Connected contains the subnets of this node's links. The podCIDR of a peer must not overlap the subnets in Connected. For this check,
	// subnets in Connected that overlap the node's own podCIDRs, such as the subnet of cni0, are ignored. Connected must not contain
	// destinations of routes to peers.
	Connected []netip.Prefix
}

// VXLAN describes the tunnel device.
type VXLAN struct {
	VNI  int `json:"vni"`  // 1 to 16777215
	Port int `json:"port"` // UDP, 1 to 65535
}

// State says how this node reaches the pods in a peer's podCIDR, or why this node cannot reach these pods.
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

// Peer is one podCIDR of another node, with the address of that node. For an invalid node object, Peer has no PodCIDR, and Reason describes
// the error.
type Peer struct {
	Name    string
	PodCIDR netip.Prefix
	Gateway netip.Addr // address of the peer, of the podCIDR's family if it has one
	// Underlay is the address of the peer in the address family of the tunnel. Without OffLinkVXLAN, Underlay is empty.
	Underlay netip.Addr
	Age      int   // index of its node among all, oldest first
	State    State // empty until Plan sets it
	Reason   string
	// Elder is true if the peer is older than this node and its podCIDR overlaps a podCIDR of this node. If Elder is true, the other nodes
	// send packets for the overlapping addresses to the older peer.
	Elder bool
	// NoLink is true if the State is Refused because the peer shares no link with this node and OffLink is OffLinkRefuse.
	NoLink bool
}

// Self is the validated content of this node's own Node object.
type Self struct {
	PodCIDRs  []netip.Prefix // at most one of each family
	Addresses []netip.Addr   // at most one of each family
}

// Underlay returns this node's address for the tunnel. If the node has an IPv4 address, Underlay returns this address. All nodes of a
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

// Advice describes an error that an administrator should correct. The field What says which part of the configuration contains the error.
// The field Why contains the reason for the error, and the field Do contains the remedy.
type Advice struct {
	What, Why, Do string
	BlocksPods    bool // no pod can work here: a node without node.json gets none
}

// TunnelLink is the value of Nexthop.Link for nexthop objects that use the tunnel. The ifindex of the tunnel device is unknown before Apply
// creates the device.
const TunnelLink = 0

// Tunnel is the wanted VXLAN device. The device does not learn addresses, because its forwarding entries for the peers are static.
type Tunnel struct {
	kernel.VXLAN
	// Addresses contains the addresses of the tunnel device. The addresses of the tunnel device are in the node's own podCIDRs. The kernel
	// uses these addresses as the source addresses of packets that the node itself sends through the tunnel. The replies to these packets
	// therefore also use the tunnel.
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
