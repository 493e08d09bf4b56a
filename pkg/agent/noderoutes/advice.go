// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// minMTU6 is the minimum MTU of a link with IPv6 (RFC 8200).
const minMTU6 = 1280

// adviseSelf reports each older node whose podCIDR overlaps one of this node.
func adviseSelf(self Self, peers []Peer, name string) (list []Advice) {
	for _, p := range peers {
		if !p.Elder {
			continue
		}
		own := self.PodCIDRs[slices.IndexFunc(self.PodCIDRs, p.PodCIDR.Overlaps)]
		why := fmt.Sprintf("its podCIDR %s overlaps %s of node %s, which is older: the other nodes send to that node", own, p.PodCIDR, p.Name)
		do := fmt.Sprintf("delete the younger Node object (kubectl delete node %s) and restart its kubelet: the node gets another podCIDR", name)
		list = append(list, Advice{What: "own node", Why: why, Do: do, BlocksPods: true})
	}
	return list
}

// adviseMTU reports a configured MTU that is too small for IPv6, or larger than the uplink's, which is 0 if unknown.
func adviseMTU(c Config, self Self, uplink int) (list []Advice) {
	if c.MTU == 0 {
		return nil
	}
	is6 := slices.IndexFunc(self.PodCIDRs, func(p netip.Prefix) bool { return p.Addr().Is6() })
	if is6 >= 0 && c.MTU < minMTU6 {
		list = append(list, Advice{What: "mtu", BlocksPods: true, Do: fmt.Sprintf("set mtu to at least %d, or remove the key", minMTU6),
			Why: fmt.Sprintf("mtu %d is too small for podCIDR %s: IPv6 needs at least %d", c.MTU, self.PodCIDRs[is6], minMTU6)})
	}
	c2 := c
	c2.MTU = 0
	if fits := c2.podMTU(self, uplink); uplink > 0 && c.MTU > fits {
		less := ""
		if c.OffLink == OffLinkVXLAN {
			less = fmt.Sprintf(", less %d of VXLAN", overhead(self.Underlay()))
		}
		list = append(list, Advice{What: "mtu", Do: fmt.Sprintf("set mtu to at most %d, or remove the key", fits),
			Why: fmt.Sprintf("mtu %d is more than the uplink carries (%d%s): larger packets to other nodes are dropped", c.MTU, uplink, less)})
	}
	return list
}

// maxNamed is how many CIDRs a message names.
const maxNamed = 5

// adviseClusterCIDRs reports podCIDRs outside the configured clusterCIDRs.
func adviseClusterCIDRs(configured, podCIDRs []netip.Prefix) []Advice {
	var missing []string
	whole := mergeCIDRs(configured)
	for _, p := range podCIDRs {
		holds := func(c netip.Prefix) bool { return c.Bits() <= p.Bits() && c.Contains(p.Addr()) }
		if !slices.ContainsFunc(whole, holds) {
			missing = append(missing, p.String())
		}
	}
	if len(missing) == 0 {
		return nil
	}
	more := ""
	if n := len(missing) - maxNamed; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return []Advice{{What: "cluster CIDRs", Do: "add them to clusterCIDRs, or remove the key: then the podCIDRs of all nodes apply",
		Why: fmt.Sprintf("clusterCIDRs lacks the podCIDRs %s%s: their pods see the address of the node instead of the calling pod's address",
			strings.Join(missing[:min(len(missing), maxNamed)], " "), more)}}
}

// ForPods reports whether pods can use the addresses of a CIDR. If not, reserved is the range that it overlaps.
func ForPods(p netip.Prefix) (reserved netip.Prefix, ok bool) {
	for _, r := range notForPods() {
		if p.Overlaps(r) {
			return r, false
		}
	}
	return netip.Prefix{}, true
}
