// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"net/netip"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns the parts of the object "ipam" that are legal and do not do what they seem to do. Pure.
func Findings(config []byte) []plugin.Finding { return plugin.UnknownKeys(config, "ipam", rawConfig{}) }

// NodeCIDRs returns the CIDRs that usePodCidr stands for on this node.
func NodeCIDRs() ([]netip.Prefix, error) {
	_, cidrs, err := nodeCIDRs(&plugin.Request{})
	return cidrs, err
}

// Subnets returns the subnets of a configuration, as far as they are well-formed and known; podCIDRs are the node's. Pure.
func Subnets(config []byte, podCIDRs []netip.Prefix) (subnets []netip.Prefix) {
	var raw rawConfig
	if json.Unmarshal(config, &raw) != nil {
		return nil
	}
	lists := raw.lists()
	words := podCIDRWords(lists)
	for _, word := range words.ranges {
		cidr, _ := words.podCIDR(word.Subnet, podCIDRs)
		word.Subnet = cidr.String()
	}
	for _, list := range lists {
		for _, r := range list {
			if subnet, err := netip.ParsePrefix(r.Subnet); err == nil {
				subnets = append(subnets, subnet)
			}
		}
	}
	return subnets
}
