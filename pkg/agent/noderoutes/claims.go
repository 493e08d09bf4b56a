// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"fmt"
	"net/netip"
	"slices"
)

// claims holds the owner of each podCIDR and address. Two CIDRs overlap only if one contains the other, so one lookup for each prefix
// length in use finds an overlap. Most clusters use two lengths.
type claims struct {
	cfg        Config
	self       Self
	lengths    map[bool][]int           // lengths of all podCIDRs; true is IPv4
	covers     map[netip.Prefix]address // prefixes of these lengths that contain an address of a node, and the oldest such node
	podCIDRs   map[netip.Prefix]string  // the node of each podCIDR
	containers map[netip.Prefix]podCIDR // larger prefixes of these lengths that contain the podCIDR of a node
	addresses  map[netip.Addr]string    // the node of each address that leads to podCIDRs
}

type (
	address struct {
		addr netip.Addr
		node string
		age  int // index of the node among all, oldest first; -1: this node
	}
	podCIDR struct {
		prefix netip.Prefix
		node   string
	}
)

// newClaims returns the claims of all nodes, which must be sorted from the oldest; own is this node's index. For other nodes only addresses
// that can be gateways count: a kubelet can put any number of addresses into its Node object, and could otherwise block the podCIDRs of all
// nodes.
func newClaims(all []nodeObject, own int, self Self, cfg Config) *claims {
	c := &claims{cfg: cfg, self: self, lengths: map[bool][]int{}, covers: map[netip.Prefix]address{},
		podCIDRs: make(map[netip.Prefix]string, 2*len(all)), containers: map[netip.Prefix]podCIDR{},
		addresses: make(map[netip.Addr]string, 2*len(all))}
	for _, n := range all {
		for _, p := range n.podCIDRs {
			if is4 := p.Addr().Is4(); !slices.Contains(c.lengths[is4], p.Bits()) {
				c.lengths[is4] = append(c.lengths[is4], p.Bits())
			}
		}
	}
	c.addCovers(all[own].addresses, cfg.Self, -1)
	for age, n := range all {
		c.addCovers(n.routableAddresses(), n.name, age)
	}
	for _, a := range self.Addresses {
		c.addresses[a] = cfg.Self
	}
	return c
}

// addCovers adds each prefix of a podCIDR's length that contains an address of the node, unless an older node already has an address in it.
func (c *claims) addCovers(addresses []netip.Addr, node string, age int) {
	for _, a := range addresses {
		for _, bits := range c.lengths[a.Is4()] {
			p := netip.PrefixFrom(a, bits).Masked()
			if _, ok := c.covers[p]; !ok {
				c.covers[p] = address{a, node, age}
			}
		}
	}
}

// peersOf returns one Peer for each podCIDR of another node. age is its index among all nodes, from the oldest.
func (c *claims) peersOf(n nodeObject, age int, older bool) (peers []Peer) {
	for _, fault := range n.faults {
		peers = append(peers, Peer{Name: n.name, State: Refused, Reason: fault})
	}
	for _, p := range n.podCIDRs {
		peer := Peer{Name: n.name, PodCIDR: p, Age: age}
		if peer.State, peer.Reason = c.claimPodCIDR(p, n, age, older); peer.State == "" {
			c.setGateway(&peer, n)
		}
		peer.Elder = older && slices.ContainsFunc(c.self.PodCIDRs, p.Overlaps)
		peers = append(peers, peer)
	}
	return peers
}

// claimPodCIDR records a node as the owner of a podCIDR, or returns the state and the reason why the node cannot have it.
func (c *claims) claimPodCIDR(p netip.Prefix, n nodeObject, age int, older bool) (State, string) {
	for _, own := range c.self.PodCIDRs {
		if own.Overlaps(p) {
			reason := fmt.Sprintf("overlaps podCIDR %s of this node", own)
			if older {
				reason += "; that node is older, so the other nodes send to it and not to this one"
			}
			return Conflict, reason
		}
	}
	if a, ok := c.conflictingAddress(p, n, age); ok {
		return Refused, fmt.Sprintf("holds the address %s of node %q", a.addr, a.node)
	}
	for _, s := range c.cfg.Connected {
		if s.Overlaps(p) && !slices.ContainsFunc(c.self.PodCIDRs, s.Overlaps) {
			return Refused, fmt.Sprintf("overlaps the subnet %s of a link of this node", s)
		}
	}
	if small, ok := c.containers[p]; ok {
		return Conflict, fmt.Sprintf("overlaps podCIDR %s of node %q, which is older", small.prefix, small.node)
	}
	for _, bits := range c.lengths[p.Addr().Is4()] {
		large := netip.PrefixFrom(p.Addr(), bits).Masked()
		if owner, ok := c.podCIDRs[large]; ok && bits <= p.Bits() {
			return Conflict, fmt.Sprintf("overlaps podCIDR %s of node %q, which is older", large, owner)
		}
	}
	c.podCIDRs[p] = n.name
	for _, bits := range c.lengths[p.Addr().Is4()] {
		if bits < p.Bits() {
			c.containers[netip.PrefixFrom(p.Addr(), bits).Masked()] = podCIDR{p, n.name}
		}
	}
	return "", ""
}

// conflictingAddress returns an address in the podCIDR p of node n that belongs to n itself or to an older node.
func (c *claims) conflictingAddress(p netip.Prefix, n nodeObject, age int) (a address, ok bool) {
	if a, ok = c.covers[p]; ok && a.age < age {
		return a, true
	}
	if i := slices.IndexFunc(n.addresses, p.Contains); i >= 0 {
		return address{n.addresses[i], n.name, age}, true
	}
	return address{}, false
}

// setGateway sets a peer's Gateway and Underlay. It prefers a gateway of the podCIDR's family. An IPv4 podCIDR can also use an IPv6
// gateway, but an IPv6 podCIDR an IPv4 one only through the tunnel.
func (c *claims) setGateway(p *Peer, n nodeObject) {
	is4 := p.PodCIDR.Addr().Is4()
	tunnel := c.cfg.OffLink == OffLinkVXLAN
	a, ok := n.firstUsable(is4)
	if !ok && (is4 || tunnel) {
		a, ok = n.firstUsable(!is4)
	}
	switch {
	case !ok && len(n.usable) > 0:
		p.State, p.Reason = Refused, "the node object has no IPv6 address of type InternalIP"
		return
	case !ok:
		p.State, p.Reason = Refused, n.noAddress
		return
	}
	p.Gateway = a
	if tunnel {
		p.Underlay, _ = n.firstUsable(c.self.Underlay().Is4())
	}
	for _, a := range []netip.Addr{p.Gateway, p.Underlay} {
		if p.Reason = c.claimAddress(a, n.name); p.Reason != "" {
			p.State, p.Gateway, p.Underlay = Refused, netip.Addr{}, netip.Addr{}
			return
		}
	}
}

// claimAddress records a node as the owner of an address, or returns the reason why another one is.
func (c *claims) claimAddress(a netip.Addr, node string) (reason string) {
	owner, taken := c.addresses[a]
	own := slices.IndexFunc(c.self.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
	switch {
	case taken && owner == c.cfg.Self:
		return fmt.Sprintf("has the address %s of this node", a)
	case taken && owner != node:
		return fmt.Sprintf("has the address %s of node %q, which is older: delete the node object that is out of date", a, owner)
	case own >= 0:
		return fmt.Sprintf("its address %s is in podCIDR %s of this node", a, c.self.PodCIDRs[own])
	case !a.IsValid():
		return ""
	}
	for _, bits := range c.lengths[a.Is4()] {
		p := netip.PrefixFrom(a, bits).Masked()
		if owner, ok := c.podCIDRs[p]; ok {
			return fmt.Sprintf("its address %s is in podCIDR %s of node %q, which is older", a, p, owner)
		}
	}
	c.addresses[a] = node
	return ""
}
