// SPDX-License-Identifier: Apache-2.0

package nodefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
)

// Parse parses node.json. It ignores unknown keys, because a newer podlace-node may write them.
func Parse(data []byte) (node Node, err error) {
	var raw struct {
		PodCIDRs     []string        `json:"podCIDRs"`
		ClusterCIDRs json.RawMessage `json:"clusterCIDRs"`
		MTU          json.RawMessage `json:"mtu"`
	}
	if json.Unmarshal(data, &raw) != nil || len(raw.PodCIDRs) == 0 {
		return Node{}, plugin.KeyErrorf("podCIDRs", `want {"podCIDRs": ["10.58.1.0/24", "fd00:58:1::/64"]}, with at least one CIDR`)
	}
	var cluster []string
	if len(raw.ClusterCIDRs) > 0 && json.Unmarshal(raw.ClusterCIDRs, &cluster) != nil {
		err = plugin.KeyErrorf("clusterCIDRs", `clusterCIDRs: want a list such as ["10.58.0.0/16"]`)
	}
	var e [2]error
	node.PodCIDRs, e[0] = parseCIDRs("podCIDRs", raw.PodCIDRs)
	node.ClusterCIDRs, e[1] = parseCIDRs("clusterCIDRs", cluster)
	err = errors.Join(e[0], err, e[1])
	for _, c := range node.ClusterCIDRs {
		if c != c.Masked() || c.Addr().Is4In6() {
			err = errors.Join(err, plugin.KeyErrorf("clusterCIDRs", "clusterCIDRs: %s: want a subnet such as 10.58.0.0/16", c))
		}
	}
	if len(raw.MTU) > 0 && json.Unmarshal(raw.MTU, &node.MTU) != nil || node.MTU != 0 && (node.MTU < minMTU || node.MTU > maxMTU) {
		err = errors.Join(err, plugin.KeyErrorf("mtu", "mtu %.100s: want a number of bytes, %d to %d", raw.MTU, minMTU, maxMTU))
	}
	if err != nil {
		return Node{}, err
	}
	return node, nil
}

func parseCIDRs(key string, texts []string) (cidrs []netip.Prefix, err error) {
	for _, s := range texts {
		cidr, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, plugin.KeyErrorf(key, "%s: %q is no CIDR", key, s)
		}
		cidrs = append(cidrs, cidr)
	}
	return cidrs, nil
}

// parseFlannel parses the shell variables in flannel's file. FLANNEL_SUBNET and FLANNEL_IPV6_SUBNET contain the address of flannel's bridge
// with the prefix length of the podCIDR.
func parseFlannel(data []byte) (node Node, err error) {
	for line := range strings.Lines(string(data)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if key != "FLANNEL_SUBNET" && key != "FLANNEL_IPV6_SUBNET" {
			continue
		}
		cidr, err := netip.ParsePrefix(strings.Trim(value, `"'`))
		if err != nil {
			return Node{}, fmt.Errorf("%s %q is no CIDR", key, value)
		}
		node.PodCIDRs = append(node.PodCIDRs, cidr.Masked())
	}
	if len(node.PodCIDRs) == 0 {
		return Node{}, errors.New("has neither FLANNEL_SUBNET nor FLANNEL_IPV6_SUBNET")
	}
	return node, nil
}
