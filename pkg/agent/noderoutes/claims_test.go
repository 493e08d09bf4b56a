// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestClaims: of two nodes with the same podCIDR or address the older keeps it, and the error of the younger names the older.
func TestClaims(t *testing.T) {
	const reason = ", which is older"
	twin := nodeOf("b", 2, "10.1.2.0/24", "192.0.2.3")
	twin.UID = "a" // sorts before "uid-a"
	for _, c := range []struct {
		what  string
		nodes []Node
		want  []peerRow
	}{
		{"the same podCIDR", []Node{nodeOf("a", 2, "10.1.2.0/24", "192.0.2.2"), nodeOf("b", 1, "10.1.2.0/24", "192.0.2.3")},
			[]peerRow{{"a", "10.1.2.0/24", "", "conflict", `overlaps podCIDR 10.1.2.0/24 of node "b"` + reason}, {"b", "10.1.2.0/24", "192.0.2.3", "", ""}}},
		{"made in one second", []Node{nodeOf("a", 2, "10.1.2.0/24", "192.0.2.2"), twin},
			[]peerRow{{"a", "10.1.2.0/24", "", "conflict", `overlaps podCIDR 10.1.2.0/24 of node "b"` + reason}, {"b", "10.1.2.0/24", "192.0.2.3", "", ""}}},
		{"the older is larger", []Node{nodeOf("a", 2, "10.1.2.0/24", "192.0.2.2"), nodeOf("b", 1, "10.1.2.0/23", "192.0.2.3")},
			[]peerRow{{"a", "10.1.2.0/24", "", "conflict", `overlaps podCIDR 10.1.2.0/23 of node "b"` + reason}, {"b", "10.1.2.0/23", "192.0.2.3", "", ""}}},
		{"the older is smaller", []Node{nodeOf("a", 2, "10.1.2.0/23", "192.0.2.2"), nodeOf("b", 1, "10.1.3.0/24", "192.0.2.3")},
			[]peerRow{{"a", "10.1.2.0/23", "", "conflict", `overlaps podCIDR 10.1.3.0/24 of node "b"` + reason}, {"b", "10.1.3.0/24", "192.0.2.3", "", ""}}},
		{"one that lost claims nothing", []Node{nodeOf("a", 1, "10.1.2.0/24", "192.0.2.2"), nodeOf("b", 2, "10.1.2.0/23", "192.0.2.3"),
			nodeOf("c", 3, "10.1.3.0/24", "192.0.2.4")},
			[]peerRow{{"a", "10.1.2.0/24", "192.0.2.2", "", ""},
				{"b", "10.1.2.0/23", "", "conflict", `overlaps podCIDR 10.1.2.0/24 of node "a"` + reason}, {"c", "10.1.3.0/24", "192.0.2.4", "", ""}}},
		{"this node's podCIDR, by a younger", []Node{nodeOf("a", 11, "10.1.0.0/24", "192.0.2.2")},
			[]peerRow{{"a", "10.1.0.0/24", "", "conflict", "overlaps podCIDR 10.1.0.0/24 of this node"}}},
		{"this node's podCIDR, by an older", []Node{nodeOf("a", 1, "10.1.0.0/25", "192.0.2.2")},
			[]peerRow{{"a", "10.1.0.0/25", "", "conflict",
				"overlaps podCIDR 10.1.0.0/24 of this node; that node is older, so the other nodes send to it and not to this one"}}},
		{"holds this node's address", []Node{nodeOf("a", 1, "192.0.2.0/29", "198.51.100.2")},
			[]peerRow{{"a", "192.0.2.0/29", "", "refused", `holds the address 192.0.2.1 of node "self"`}}},
		{"holds another's address, although that is refused",
			[]Node{nodeOf("a", 2, "198.51.100.0/24", "192.0.2.2"), nodeOf("b", 1, "::/0", "198.51.100.7")},
			[]peerRow{{"a", "198.51.100.0/24", "", "refused", `holds the address 198.51.100.7 of node "b"`},
				{"b", "", "", "refused", "podCIDR ::/0 covers all addresses of its family"}}},
		{"a younger node has addresses in podCIDRs of other nodes", []Node{nodeOf("a", 1, "10.1.2.0/24", "192.0.2.2"),
			nodeOf("b", 2, "10.1.3.0/24", "192.0.2.3"), nodeOf("c", 3, "10.1.4.0/24 fd00:4::/64", "10.1.2.7 10.1.3.7 2001:db8::4")},
			[]peerRow{{"a", "10.1.2.0/24", "192.0.2.2", "", ""}, {"b", "10.1.3.0/24", "192.0.2.3", "", ""},
				{"c", "10.1.4.0/24", "", "refused", `its address 10.1.2.7 is in podCIDR 10.1.2.0/24 of node "a"` + reason},
				{"c", "fd00:4::/64", "2001:db8::4", "", ""}}},
		{"an older one has more addresses than lead to it", []Node{nodeOf("a", 2, "10.1.2.0/24", "192.0.2.2"),
			nodeOf("b", 2, "10.1.3.0/24", "192.0.2.3"), nodeOf("c", 1, "10.1.4.0/24", "10.1.2.7 10.1.3.7")},
			[]peerRow{{"a", "10.1.2.0/24", "", "refused", `holds the address 10.1.2.7 of node "c"`},
				{"b", "10.1.3.0/24", "192.0.2.3", "", ""}, {"c", "10.1.4.0/24", "10.1.2.7", "", ""}}},
		{"holds its own address", []Node{nodeOf("a", 1, "198.51.100.0/24", "198.51.100.7")},
			[]peerRow{{"a", "198.51.100.0/24", "", "refused", `holds the address 198.51.100.7 of node "a"`}}},
		{"holds a further address", []Node{nodeOf("a", 1, "198.51.100.0/24", "192.0.2.2 ::ffff:198.51.100.7")},
			[]peerRow{{"a", "198.51.100.0/24", "", "refused", `holds the address 198.51.100.7 of node "a"`}}},
		{"one address", []Node{nodeOf("a", 2, "10.1.2.0/24", "192.0.2.2"), nodeOf("b", 1, "10.1.3.0/24", "192.0.2.2")},
			[]peerRow{{"a", "10.1.2.0/24", "", "refused",
				`has the address 192.0.2.2 of node "b", which is older: delete the node object that is out of date`},
				{"b", "10.1.3.0/24", "192.0.2.2", "", ""}}},
		{"one name", []Node{nodeOf("a", 1, "10.1.2.0/24", "192.0.2.2"), nodeOf("a", 2, "10.1.3.0/24", "192.0.2.3"),
			nodeOf("self", 20, "10.1.4.0/24", "192.0.2.4")},
			[]peerRow{{"a", "", "", "refused", "there is a second node object with this name"}, {"a", "10.1.2.0/24", "192.0.2.2", "", ""},
				{"self", "", "", "refused", "there is a second node object with this name"}}},
		{"a link's subnet", []Node{nodeOf("a", 1, "172.17.9.0/24", "192.0.2.2"), nodeOf("b", 2, "172.16.0.0/12", "192.0.2.3")},
			[]peerRow{{"a", "172.17.9.0/24", "", "refused", "overlaps the subnet 172.17.0.0/16 of a link of this node"},
				{"b", "172.16.0.0/12", "", "refused", "overlaps the subnet 172.17.0.0/16 of a link of this node"}}},
		{"a part of the uplink's subnet", []Node{nodeOf("a", 1, "192.0.2.128/25", "192.0.2.2")},
			[]peerRow{{"a", "192.0.2.128/25", "", "refused", "overlaps the subnet 192.0.2.0/24 of a link of this node"}}},
	} {
		t.Run(c.what, func(t *testing.T) {
			cfg := Config{Self: "self", Connected: []netip.Prefix{netip.MustParsePrefix("172.17.0.0/16"), netip.MustParsePrefix("192.0.2.0/24"),
				netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("10.0.0.0/8")}}
			_, peers, err := Peers(append(c.nodes, self()), cfg)
			if diff := cmp.Diff(c.want, rows(peers)); err != nil || diff != "" {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}
