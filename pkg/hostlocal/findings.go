// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"net/netip"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns the keys of the object "ipam" that are valid but do not have the effect that they suggest. It does no I/O.
func Findings(config []byte) []plugin.Finding { return plugin.UnknownKeys(config, "ipam", rawConfig{}) }

// NodeCIDRs returns this node's CIDRs, for which usePodCidr stands.
func NodeCIDRs() ([]netip.Prefix, error) {
	_, cidrs, err := nodeCIDRs(&plugin.Request{})
	return cidrs, err
}

// Subnets returns the well-formed and known subnets of a configuration. podCIDRs are the node's. It does no I/O.
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
