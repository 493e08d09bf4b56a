// SPDX-License-Identifier: Apache-2.0

// Package noderoutes computes and applies the kernel state that connects a node's pods with those of other nodes. Peers and Plan compute it
// without I/O, and Apply makes the necessary changes. Every object of Apply has the route protocol Protocol; those of other programs are
// left alone, except routes that Options.Adopt selects.
package noderoutes

import (
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// Protocol is the protocol number of the agent's routes, nexthop objects and neighbours (rtm_protocol). iproute2's rt_protos does not use
// it.
const Protocol = 142

// Node holds fields of a Kubernetes Node object, not yet validated.
type Node struct {
	Name    string
	UID     string
	Created time.Time // metadata.creationTimestamp
	// PodCIDRs is spec.podCIDRs. Addresses has those of type InternalIP in the order of status.addresses.
	PodCIDRs  []string
	Addresses []string
	Boot      string // status.nodeInfo.bootID
	Ready     bool   // the condition
}

// OffLink selects how this node reaches pods of nodes that share no link with it.
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
	// Connected holds the subnets of this node's links, which no peer's podCIDR may overlap, except those that overlap the node's own
	// podCIDRs, such as the subnet of cni0. It must not contain destinations of routes to peers.
	Connected []netip.Prefix
}

// VXLAN describes the tunnel device.
type VXLAN struct {
	VNI  int `json:"vni"`  // 1 to 16777215
	Port int `json:"port"` // UDP, 1 to 65535
}

// State says how this node reaches the pods in a peer's podCIDR, or why it cannot.
type State string

// Values of State.
const (
	Direct   State = "direct"   // by a route to the peer, which shares a link with this node
	Tunneled State = "vxlan"    // through the tunnel
	Fabric   State = "fabric"   // by external routers
	Refused  State = "refused"  // the node object is invalid, or no route leads to the peer: see Reason
	Conflict State = "conflict" // another node, or a route of another program, has the podCIDR: see Reason
	Silent   State = "silent"   // by a route, but the gateway address of its pods answers no more; only the agent sets this state
	Failed   State = "failed"   // the kernel refused a change, which is retried: see Reason
)

// Peer is one podCIDR of another node, with that node's address. For an invalid node object PodCIDR is empty, and Reason describes the
// error.
type Peer struct {
	Name    string
	PodCIDR netip.Prefix
	Gateway netip.Addr // address of the peer, of the podCIDR's family if it has one
	// Underlay is the peer's address in the family of the tunnel, or empty without OffLinkVXLAN.
	Underlay netip.Addr
	Age      int   // index of its node among all, oldest first
	State    State // empty until Plan sets it
	Reason   string
	// Elder is true if the peer is older than this node and its podCIDR overlaps one of this node, so other nodes send packets for the
	// overlap to the peer.
	Elder bool
	// NoLink is true if State is Refused because the peer shares no link with this node and OffLink is OffLinkRefuse.
	NoLink bool
}

// Self is the validated content of this node's own Node object.
type Self struct {
	PodCIDRs  []netip.Prefix // at most one of each family
	Addresses []netip.Addr   // at most one of each family
}

// Underlay returns this node's address for the tunnel, preferably IPv4. All nodes of a cluster must use the same family.
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

// Advice describes an error that an administrator should correct: What is the part of the configuration, Why the reason, Do the remedy.
type Advice struct {
	What, Why, Do string
	BlocksPods    bool // no pod can work here: a node without node.json gets none
}

// TunnelLink is the Nexthop.Link of nexthop objects that use the tunnel, whose ifindex is unknown before Apply creates the device.
const TunnelLink = 0

// Tunnel is the wanted VXLAN device. It learns no addresses, because its forwarding entries are static.
type Tunnel struct {
	kernel.VXLAN
	// Addresses are those of the device, from the node's own podCIDRs. The kernel uses them as source addresses of the node's own packets
	// through the tunnel, so the replies take the tunnel too.
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
