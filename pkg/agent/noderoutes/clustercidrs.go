// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/nodefile"
)

// clusterCIDRs returns the CIDRs of all pods: the configured ones, or else the podCIDRs of all nodes. If there are more than
// MaxClusterCIDRs, it returns that many with an Advice.
func clusterCIDRs(configured, podCIDRs []netip.Prefix) (cidrs []netip.Prefix, advice []Advice) {
	if len(configured) > 0 {
		advice = adviseClusterCIDRs(configured, podCIDRs)
		podCIDRs = configured
	}
	cidrs = mergeCIDRs(podCIDRs)
	if n := len(cidrs); n > nodefile.MaxClusterCIDRs {
		return cidrs[:nodefile.MaxClusterCIDRs], append(advice, Advice{What: "cluster CIDRs", Do: "set clusterCIDRs in the configuration",
			Why: fmt.Sprintf("the podCIDRs of all nodes are %d separate ranges, and only %d fit: pods of the other ranges see this node's address",
				n, nodefile.MaxClusterCIDRs)})
	}
	return cidrs, advice
}

// MergeCIDRs merges two lists of CIDRs into at most MaxClusterCIDRs.
func MergeCIDRs(a, b []netip.Prefix) []netip.Prefix {
	all := mergeCIDRs(slices.Concat(a, b))
	return all[:min(len(all), nodefile.MaxClusterCIDRs)]
}

// mergeCIDRs returns the shortest sorted list of CIDRs with exactly the same addresses: a CIDR inside another is dropped, and two halves
// are joined.
func mergeCIDRs(cidrs []netip.Prefix) (merged []netip.Prefix) {
	cidrs = slices.Clone(cidrs)
	slices.SortFunc(cidrs, netip.Prefix.Compare)
	for _, p := range cidrs {
		p = p.Masked()
		if n := len(merged); n > 0 && merged[n-1].Overlaps(p) { // the larger one sorts first
			continue
		}
		merged = append(merged, p)
		for n := len(merged); n > 1; n-- {
			whole, ok := joinHalves(merged[n-2], merged[n-1])
			if !ok {
				break
			}
			merged = append(merged[:n-2], whole)
		}
	}
	return merged
}

// joinHalves returns the CIDR whose halves are a and b, and whether there is one.
func joinHalves(a, b netip.Prefix) (netip.Prefix, bool) {
	if a.Bits() != b.Bits() || a.Bits() == 0 || a.Addr().Is4() != b.Addr().Is4() {
		return netip.Prefix{}, false
	}
	whole := netip.PrefixFrom(a.Addr(), a.Bits()-1).Masked()
	return whole, a != b && whole.Contains(b.Addr())
}
