// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// TestAdvice compares reason and effect on pods of each error in the configuration or in this node's object.
func TestAdvice(t *testing.T) {
	near := nodeOf("near", 20, "10.1.2.0/24 fd00:2::/64", "192.0.2.2 2001:db8::2") // the MTU of its link is 9000
	for name, c := range map[string]struct {
		cfg   Config
		nodes []Node
		why   string
		hold  bool
	}{
		"an MTU that IPv6 does not have": {Config{MTU: 600}, []Node{nodeOf("self", 1, "10.1.0.0/24 fd00::/64", "192.0.2.1 2001:db8::1")},
			"mtu 600 is too small for podCIDR fd00::/64: IPv6 needs at least 1280", true},
		"the same without IPv6":     {Config{MTU: 600}, []Node{nodeOf("self", 1, "10.1.0.0/24", "192.0.2.1")}, "", false},
		"an MTU above the uplink's": {Config{MTU: 9001}, []Node{self(), near}, "mtu 9001 is more than the uplink carries (9000): ", false},
		"an MTU above the tunnel's": {Config{MTU: 8951, OffLink: OffLinkVXLAN}, []Node{self(), near}, "(9000, less 50 of VXLAN): ", false},
		"an MTU that fits":          {Config{MTU: 8950, OffLink: OffLinkVXLAN}, []Node{self(), near}, "", false},
		"cluster CIDRs without this node": {Config{ClusterCIDRs: prefixes("10.2.0.0/16", "fd00::/16")}, []Node{self()},
			"clusterCIDRs lacks the podCIDRs 10.1.0.0/24: ", false},
		"cluster CIDRs without a peer": {Config{ClusterCIDRs: prefixes("10.1.0.0/16", "fd00:1::/64")}, []Node{self(), near},
			"lacks the podCIDRs fd00:2::/64: ", false},
		"the halves of a podCIDR": {Config{ClusterCIDRs: prefixes("10.1.0.0/25", "10.1.0.128/25", "fd00::/16")}, []Node{self()},
			"", false},
		"an older node with our podCIDR": {Config{}, []Node{self(), nodeOf("old", 1, "10.1.0.0/25", "192.0.2.2")},
			"10.1.0.0/25 of node old, which is older", true},
		"a younger node with our podCIDR": {Config{}, []Node{self(), nodeOf("new", 99, "10.1.0.0/25", "192.0.2.2")}, "", false},
	} {
		want, _, _ := runPlan(t, c.cfg, c.nodes...)
		switch {
		case c.why == "" && len(want.Advice) == 0:
		case c.why == "" || len(want.Advice) != 1 || !strings.Contains(want.Advice[0].Why, c.why) || want.Advice[0].BlocksPods != c.hold || want.Advice[0].Do == "":
			t.Errorf("%s: %+v, want %q", name, want.Advice, c.why)
		}
	}
}

func prefixes(texts ...string) (list []netip.Prefix) {
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}

func TestSelfError(t *testing.T) {
	for name, c := range map[string]struct {
		node Node
		cfg  Config
		why  string
		do   string
	}{
		"no podCIDR": {nodeOf("self", 1, "", "192.0.2.1"), Config{}, "has no podCIDRs", "--allocate-node-cidrs"},
		"no address": {nodeOf("self", 1, "10.1.0.0/24", ""), Config{}, "no address of type InternalIP", "--node-ip"},
		"outside": {nodeOf("self", 1, "10.1.0.0/24", "192.0.2.1"), Config{AddressCIDRs: prefixes("198.51.100.0/24")}, "is not in addressCIDRs",
			"correct addressCIDRs"},
		"in its podCIDR": {nodeOf("self", 1, "192.0.2.0/24", "192.0.2.1"), Config{}, "contains the node's own address",
			"does not overlap the network"},
		"broadcast address": {nodeOf("self", 1, "10.1.0.0/24", "192.0.2.255"), Config{Connected: prefixes("192.0.2.1/24")},
			"is the broadcast address",
			"--node-ip"},
	} {
		c.cfg.Self = "self"
		_, _, err := Peers([]Node{c.node}, c.cfg)
		var wrong *SelfError
		if !errors.As(err, &wrong) || !strings.Contains(wrong.Why, c.why) || !strings.Contains(wrong.Do, c.do) {
			t.Errorf("%s: %v, %+v", name, err, wrong)
		}
	}
}
