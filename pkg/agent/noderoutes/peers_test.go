// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func same() cmp.Options {
	return cmp.Options{cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b })}
}

// nodeOf returns a Node that was created on a day of January 2026. Spaces separate its podCIDRs and addresses.
func nodeOf(name string, day int, podCIDRs, addresses string) Node {
	return Node{Name: name, UID: "uid-" + name, Created: time.Date(2026, 1, day, 0, 0, 0, 0, time.UTC), PodCIDRs: strings.Fields(podCIDRs),
		Addresses: strings.Fields(addresses)}
}

func self() Node { return nodeOf("self", 10, "10.1.0.0/24 fd00:1::/64", "192.0.2.1 2001:db8::1") }

// peerRow holds the fields of a Peer that the tests compare.
type peerRow struct{ Name, PodCIDR, Gateway, State, Reason string }

func rows(peers []Peer) (list []peerRow) {
	for _, p := range peers {
		r := peerRow{Name: p.Name, State: string(p.State), Reason: p.Reason}
		if p.PodCIDR.IsValid() {
			r.PodCIDR = p.PodCIDR.String()
		}
		if p.Gateway.IsValid() {
			r.Gateway = p.Gateway.String()
		}
		list = append(list, r)
	}
	return list
}

func TestPeers(t *testing.T) {
	refused := func(cidr, reason string) []peerRow { return []peerRow{{"a", cidr, "", "refused", reason}} }
	const address = "192.0.2.2 2001:db8::2"
	for _, c := range []struct {
		what  string
		nodes []Node
		want  []peerRow
	}{
		{"alone", nil, nil},
		{"both families", []Node{nodeOf("a", 1, "10.1.2.0/24 fd00:2::/64", address)},
			[]peerRow{{"a", "10.1.2.0/24", "192.0.2.2", "", ""}, {"a", "fd00:2::/64", "2001:db8::2", "", ""}}},
		{"the first address of a family", []Node{nodeOf("a", 1, "10.1.2.0/24", "2001:db8::2 192.0.2.2 192.0.2.3")},
			[]peerRow{{"a", "10.1.2.0/24", "192.0.2.2", "", ""}}},
		{"IPv4 pods over IPv6", []Node{nodeOf("a", 1, "10.1.2.0/24", "2001:db8::2")}, []peerRow{{"a", "10.1.2.0/24", "2001:db8::2", "", ""}}},
		{"IPv6 pods over IPv4", []Node{nodeOf("a", 1, "fd00:2::/64", "192.0.2.2")},
			refused("fd00:2::/64", "the node object has no IPv6 address of type InternalIP")},
		{"no podCIDR", []Node{nodeOf("a", 1, "", address)}, refused("",
			"the node object has no podCIDRs: does kube-controller-manager run with --allocate-node-cidrs, and is its range exhausted?")},
		{"no address", []Node{nodeOf("a", 1, "10.1.2.0/24", "")},
			refused("10.1.2.0/24", "the node object has no address of type InternalIP")},
		{"no CIDR", []Node{nodeOf("a", 1, "pods", address)}, refused("", `podCIDR "pods" is no CIDR`)},
		{"an address", []Node{nodeOf("a", 1, "10.1.2.0", address)}, refused("", `podCIDR "10.1.2.0" is no CIDR`)},
		{"/0", []Node{nodeOf("a", 1, "0.0.0.0/0", address)}, refused("", "podCIDR 0.0.0.0/0 covers all addresses of its family")},
		{"::/0", []Node{nodeOf("a", 1, "::/0", address)}, refused("", "podCIDR ::/0 covers all addresses of its family")},
		{"/32", []Node{nodeOf("a", 1, "10.1.2.0/32", address)}, refused("", "podCIDR 10.1.2.0/32 has no room for a gateway and a pod")},
		{"/31", []Node{nodeOf("a", 1, "10.1.2.0/31", address)}, refused("", "podCIDR 10.1.2.0/31 has no room for a gateway and a pod")},
		{"/128", []Node{nodeOf("a", 1, "fd00::1/128", address)}, refused("", "podCIDR fd00::1/128 has no room for a gateway and a pod")},
		{"host bits", []Node{nodeOf("a", 1, "10.1.2.3/24", address)}, refused("", "podCIDR 10.1.2.3/24 has host bits set: want 10.1.2.0/24")},
		{"mapped", []Node{nodeOf("a", 1, "::ffff:10.1.2.0/120", address)}, refused("", "podCIDR ::ffff:10.1.2.0/120 is IPv4-mapped")},
		{"loopback", []Node{nodeOf("a", 1, "127.1.0.0/16", address)},
			refused("", "podCIDR 127.1.0.0/16 overlaps 127.0.0.0/8, which pods cannot use")},
		{"holds the loopback", []Node{nodeOf("a", 1, "126.0.0.0/7", address)},
			refused("", "podCIDR 126.0.0.0/7 overlaps 127.0.0.0/8, which pods cannot use")},
		{"link-local", []Node{nodeOf("a", 1, "169.254.1.0/24", address)},
			refused("", "podCIDR 169.254.1.0/24 overlaps 169.254.0.0/16, which pods cannot use")},
		{"multicast", []Node{nodeOf("a", 1, "224.1.0.0/16", address)},
			refused("", "podCIDR 224.1.0.0/16 overlaps 224.0.0.0/4, which pods cannot use")},
		{"unspecified", []Node{nodeOf("a", 1, "0.0.0.0/24", address)},
			refused("", "podCIDR 0.0.0.0/24 overlaps 0.0.0.0/8, which pods cannot use")},
		{"::1", []Node{nodeOf("a", 1, "::/120", address)}, refused("", "podCIDR ::/120 overlaps ::/96, which pods cannot use")},
		{"link-local IPv6", []Node{nodeOf("a", 1, "fe80::/64", address)},
			refused("", "podCIDR fe80::/64 overlaps fe80::/10, which pods cannot use")},
		{"multicast IPv6", []Node{nodeOf("a", 1, "ff02::/64", address)},
			refused("", "podCIDR ff02::/64 overlaps ff00::/8, which pods cannot use")},
		{"class E", []Node{nodeOf("a", 1, "240.1.2.0/24", address)}, []peerRow{{"a", "240.1.2.0/24", "192.0.2.2", "", ""}}},
		{"three podCIDRs", []Node{nodeOf("a", 1, "10.1.2.0/24 fd00:2::/64 10.1.3.0/24", address)},
			refused("", `the node object has podCIDRs ["10.1.2.0/24" "fd00:2::/64" "10.1.3.0/24"]: want at most one of each family`)},
		{"two of a family", []Node{nodeOf("a", 1, "10.1.2.0/24 10.1.3.0/24", address)},
			refused("", `the node object has podCIDRs ["10.1.2.0/24" "10.1.3.0/24"]: want at most one of each family`)},
		{"one is good", []Node{nodeOf("a", 1, "10.1.2.0/24 ::/0", address)},
			append(refused("", "podCIDR ::/0 covers all addresses of its family"), peerRow{"a", "10.1.2.0/24", "192.0.2.2", "", ""})},
		{"a long text", []Node{nodeOf("a", 1, strings.Repeat("x", 10<<20), address)},
			refused("", `podCIDR "`+strings.Repeat("x", 60)+`" is no CIDR`)},
		{"a long name", []Node{nodeOf(strings.Repeat("n", 253), 1, "10.1.2.0/24", address)},
			[]peerRow{{strings.Repeat("n", 253), "10.1.2.0/24", "192.0.2.2", "", ""}}},
	} {
		t.Run(c.what, func(t *testing.T) {
			_, peers, err := Peers(append(c.nodes, self()), Config{Self: "self"})
			if diff := cmp.Diff(c.want, rows(peers)); err != nil || diff != "" {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}

// TestPeerAddresses: a node's address to which no route can lead is ignored.
func TestPeerAddresses(t *testing.T) {
	within := []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	for _, c := range []struct {
		addresses, gateway, reason string
		within                     []netip.Prefix
	}{
		{"127.0.0.1", "", `InternalIP "127.0.0.1" is no unicast address of a node`, nil},
		{"0.0.0.0", "", `InternalIP "0.0.0.0" is no unicast address of a node`, nil},
		{"224.0.0.5", "", `InternalIP "224.0.0.5" is no unicast address of a node`, nil},
		{"255.255.255.255", "", `InternalIP "255.255.255.255" is no unicast address of a node`, nil},
		{"169.254.1.1", "", `InternalIP "169.254.1.1" is a link-local address`, nil},
		{"fe80::1", "", `InternalIP "fe80::1" is a link-local address`, nil},
		{"2001:db8::9%eth0", "", `InternalIP "2001:db8::9%eth0" is a link-local address`, nil},
		{"::ffff:192.0.2.2", "", `InternalIP "::ffff:192.0.2.2" is an IPv4-mapped address`, nil},
		{"host", "", `InternalIP "host" is no IP address`, nil},
		{"192.0.2.1", "", "has the address 192.0.2.1 of this node", nil},
		{"10.1.0.7", "", "its address 10.1.0.7 is in podCIDR 10.1.0.0/24 of this node", nil},
		{"host 127.0.0.1 192.0.2.2", "192.0.2.2", "", nil},
		{"192.0.2.2 198.51.100.2 198.51.100.3", "198.51.100.2", "", within},
		{"192.0.2.2", "", `InternalIP "192.0.2.2" is not in addressCIDRs`, within},
	} {
		t.Run(c.addresses, func(t *testing.T) {
			me := self()
			me.Addresses = append(me.Addresses, "198.51.100.1")
			_, peers, err := Peers([]Node{me, nodeOf("a", 1, "10.1.2.0/24", c.addresses)}, Config{Self: "self", AddressCIDRs: c.within})
			state := ""
			if c.reason != "" {
				state = "refused"
			}
			if diff := cmp.Diff([]peerRow{{"a", "10.1.2.0/24", c.gateway, state, c.reason}}, rows(peers)); err != nil || diff != "" {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}

// TestSelf: any invalid part of this node's own object is an error.
func TestSelf(t *testing.T) {
	for _, c := range []struct {
		own  Node
		want string
	}{
		{nodeOf("other", 1, "10.1.0.0/24", "192.0.2.1"), `there is no node object with the name of this node, "self"`},
		{nodeOf("self", 1, "", "192.0.2.1"), `node "self": the node object has no podCIDRs: does kube-controller-manager run with`},
		{nodeOf("self", 1, "10.1.0.0/24", ""), `node "self": the node object has no address of type InternalIP`},
		{nodeOf("self", 1, "10.1.0.0/24", "127.0.0.1"), `node "self": InternalIP "127.0.0.1" is no unicast address of a node`},
		{nodeOf("self", 1, "10.1.0.0/24 ::/0", "192.0.2.1"), `node "self": podCIDR ::/0 covers all addresses of its family`},
		{nodeOf("self", 1, "192.0.2.0/24", "192.0.2.1"), `node "self": podCIDR 192.0.2.0/24 contains the node's own address 192.0.2.1`},
		{nodeOf("self", 1, "198.51.100.0/24", "192.0.2.1 198.51.100.9"),
			`node "self": podCIDR 198.51.100.0/24 contains the node's own address 198.51.100.9`},
		{nodeOf("self", 1, "10.1.0.0/24 10.2.0.0/24", "192.0.2.1"), `want at most one of each family`},
	} {
		if _, _, err := Peers([]Node{c.own, nodeOf("a", 1, "10.1.2.0/24", "192.0.2.2")}, Config{Self: "self"}); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.own, err, c.want)
		}
	}
	for _, nodes := range [][]Node{nil, {nodeOf("self", 1, "10.1.0.0/24", "192.0.2.1")}} {
		if _, _, err := Peers(nodes, Config{}); err == nil {
			t.Error("no error without a name")
		}
	}
	got, _, err := Peers([]Node{nodeOf("self", 1, "fd00:1::/64 10.1.0.0/24", "2001:db8::1 192.0.2.1 192.0.2.9")}, Config{Self: "self"})
	want := Self{[]netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("fd00:1::/64")},
		[]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	if diff := cmp.Diff(want, got, same()); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
}
