// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Peers validates all Node objects, including this node's, in any order. It returns one Peer for each podCIDR of the other nodes, sorted by
// name and podCIDR; for those that this node cannot use, State and Reason say why. It fails if this node's object is missing or invalid.
//
// Two nodes conflict if they have the same podCIDR or address, or if the podCIDR of one contains an address of the other. The older one
// keeps it: that with the earlier creationTimestamp, then with the smaller UID. A node always keeps its own podCIDRs, because its pods
// already use their addresses.
func Peers(nodes []Node, cfg Config) (Self, []Peer, error) {
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, byAge)
	own := slices.IndexFunc(nodes, func(n Node) bool { return n.Name == cfg.Self })
	if own < 0 {
		return Self{}, nil, &SelfError{fmt.Sprintf("there is no node object with the name of this node, %.260q", cfg.Self),
			"register the node, or correct the name (NODE_NAME, --node-name)"}
	}
	all := make([]nodeObject, len(nodes))
	for i, n := range nodes {
		all[i] = check(n, cfg)
	}
	self, wrong := all[own].asSelf()
	if wrong != nil {
		wrong.Why = fmt.Sprintf("node %.260q: %s", cfg.Self, wrong.Why)
		return Self{}, nil, wrong
	}
	c := newClaims(all, own, self, cfg)
	var peers []Peer
	seen := map[string]bool{cfg.Self: true}
	for i, n := range all {
		switch {
		case i == own:
		case seen[n.name]:
			peers = append(peers, Peer{Name: n.name, State: Refused, Reason: "there is a second node object with this name"})
		default:
			seen[n.name] = true
			peers = append(peers, c.peersOf(n, i, i < own)...)
		}
	}
	slices.SortFunc(peers, byName)
	return self, peers, nil
}

func byAge(a, b Node) int {
	if c := a.Created.Compare(b.Created); c != 0 {
		return c
	}
	if c := cmp.Or(strings.Compare(a.UID, b.UID), strings.Compare(a.Name, b.Name)); c != 0 {
		return c
	}
	return cmp.Or(slices.Compare(a.PodCIDRs, b.PodCIDRs), slices.Compare(a.Addresses, b.Addresses))
}

func byName(a, b Peer) int {
	if c := strings.Compare(a.Name, b.Name); c != 0 {
		return c
	}
	return cmp.Or(a.PodCIDR.Compare(b.PodCIDR), strings.Compare(a.Reason, b.Reason))
}

// nodeObject is a parsed Node object.
type nodeObject struct {
	name      string
	podCIDRs  []netip.Prefix
	addresses []netip.Addr // all valid addresses, for overlaps with the node's own podCIDRs
	usable    []netip.Addr // addresses in addressCIDRs that a route can lead to, in their order
	faults    []string     // why podCIDRs were dropped
	noAddress string       // why there is no usable address, or no second one
}

func check(n Node, cfg Config) nodeObject {
	c := nodeObject{name: n.Name, noAddress: "the node object has no address of type InternalIP"}
	if len(n.PodCIDRs) == 0 {
		c.faults = []string{"the node object has no podCIDRs: does kube-controller-manager run with --allocate-node-cidrs, and is its range exhausted?"}
	}
	families := map[bool]int{}
	for _, text := range n.PodCIDRs {
		p, err := parsePodCIDR(text)
		if err != nil {
			c.faults = append(c.faults, err.Error())
			continue
		}
		families[p.Addr().Is4()]++
		c.podCIDRs = append(c.podCIDRs, p)
	}
	if len(n.PodCIDRs) > 2 || families[true] > 1 || families[false] > 1 {
		c.podCIDRs = nil
		c.faults = []string{fmt.Sprintf("the node object has podCIDRs %.200q: want at most one of each family", n.PodCIDRs)}
	}
	for _, text := range n.Addresses {
		a, err := netip.ParseAddr(text)
		if err == nil {
			c.addresses = append(c.addresses, a.Unmap().WithZone(""))
		}
		if reason := cmp.Or(unusableReason(a, err, cfg.AddressCIDRs), broadcastReason(a, cfg.Connected)); reason != "" {
			c.noAddress = fmt.Sprintf("InternalIP %.60q %s", text, reason)
			continue
		}
		c.usable = append(c.usable, a)
	}
	return c
}

// unusableReason returns why no route can lead to a node's address, or "" if one can.
func unusableReason(a netip.Addr, err error, within []netip.Prefix) string {
	switch {
	case err != nil:
		return "is no IP address"
	case a.Is4In6():
		return "is an IPv4-mapped address"
	case a.IsLinkLocalUnicast() || a.Zone() != "":
		return "is a link-local address"
	case !a.IsGlobalUnicast(): // unspecified, loopback, multicast, broadcast
		return "is no unicast address of a node"
	case len(within) > 0 && !slices.ContainsFunc(within, func(p netip.Prefix) bool { return p.Contains(a) }):
		return "is not in addressCIDRs"
	}
	return ""
}

// broadcastReason returns why an address is unusable as the broadcast or first address of a subnet of this node's links, or "".
func broadcastReason(a netip.Addr, connected []netip.Prefix) string {
	for _, s := range connected {
		if !a.Is4() || !s.Addr().Is4() || s.Bits() > 30 || !s.Contains(a) {
			continue
		}
		if a == s.Masked().Addr() || !s.Contains(a.Next()) {
			return fmt.Sprintf("is the broadcast address or the first address of the subnet %s", s.Masked())
		}
	}
	return ""
}

// firstUsable returns the first usable address of a family.
func (c nodeObject) firstUsable(is4 bool) (netip.Addr, bool) {
	for _, a := range c.usable {
		if a.Is4() == is4 {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// routableAddresses returns the addresses of a node that can be gateways: the first usable one of each family.
func (c nodeObject) routableAddresses() (list []netip.Addr) {
	for _, is4 := range []bool{true, false} {
		if a, ok := c.firstUsable(is4); ok {
			list = append(list, a)
		}
	}
	return list
}

// SelfError is the error for an invalid or missing object of this node, with its reason and remedy.
type SelfError struct{ Why, Do string }

// Error returns the reason.
func (e *SelfError) Error() string { return e.Why }

// asSelf returns the content of this node's own object. Any invalid part is an error, because node.json needs all podCIDRs.
func (c nodeObject) asSelf() (s Self, err *SelfError) {
	if len(c.faults) > 0 {
		return Self{}, &SelfError{c.faults[0], "kube-controller-manager gives podCIDRs with --allocate-node-cidrs and --cluster-cidr; " +
			"to get others, delete the Node object and restart its kubelet"}
	}
	if s.Addresses = c.routableAddresses(); len(s.Addresses) == 0 {
		do := "give the kubelet the node's address by --node-ip"
		if len(c.addresses) > 0 {
			do = "correct addressCIDRs in the configuration so that they contain an InternalIP of each node, or give the kubelet another --node-ip"
		}
		return Self{}, &SelfError{c.noAddress, do}
	}
	for _, p := range c.podCIDRs {
		for _, a := range c.addresses {
			if p.Contains(a) {
				return Self{}, &SelfError{fmt.Sprintf("podCIDR %s contains the node's own address %s", p, a), "choose a --cluster-cidr of " +
					"kube-controller-manager that does not overlap the network of the nodes, delete the Node object and restart its kubelet"}
			}
		}
	}
	s.PodCIDRs = slices.SortedFunc(slices.Values(c.podCIDRs), netip.Prefix.Compare)
	return s, nil
}

func notForPods() [8]netip.Prefix {
	v4 := func(a, b byte, bits int) netip.Prefix { return netip.PrefixFrom(netip.AddrFrom4([4]byte{a, b}), bits) }
	v6 := func(a, b byte, bits int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{a, b}), bits)
	}
	broadcast := netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), 32)
	return [8]netip.Prefix{v4(0, 0, 8), v4(127, 0, 8), v4(169, 254, 16), v4(224, 0, 4), broadcast, // this node, loopback, ...
		v6(0, 0, 96), v6(0xfe, 0x80, 10), v6(0xff, 0, 8)} // loopback, link-local, multicast
}

// parsePodCIDR refuses prefixes whose addresses pods cannot use, because a route to them would divert other traffic.
func parsePodCIDR(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return netip.Prefix{}, fmt.Errorf("podCIDR %.60q is no CIDR", text)
	case p.Addr().Is4In6():
		return netip.Prefix{}, fmt.Errorf("podCIDR %s is IPv4-mapped", p)
	case p != p.Masked():
		return netip.Prefix{}, fmt.Errorf("podCIDR %s has host bits set: want %s", p, p.Masked())
	case p.Bits() == 0:
		return netip.Prefix{}, fmt.Errorf("podCIDR %s covers all addresses of its family", p)
	case p.Addr().BitLen()-p.Bits() < 2:
		return netip.Prefix{}, fmt.Errorf("podCIDR %s has no room for a gateway and a pod", p)
	}
	if r, ok := ForPods(p); !ok {
		return netip.Prefix{}, fmt.Errorf("podCIDR %s overlaps %s, which pods cannot use", p, r)
	}
	return p, nil
}
