// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns the keys of "ipam" that are valid but have no effect, or another one than their name suggests. It does no I/O.
func Findings(config []byte) []plugin.Finding { return plugin.UnknownKeys(config, "ipam", rawConfig{}) }

// Subnets returns the valid and known subnets in a configuration; podCIDRs are those of the node. It does no I/O.
func Subnets(config []byte, podCIDRs []netip.Prefix) (subnets []netip.Prefix) {
	var raw rawConfig
	if json.Unmarshal(config, &raw) != nil {
		return nil
	}
	lists, _ := withCIDRs(raw.rangeLists(), podCIDRs)
	for _, r := range slices.Concat(lists...) {
		if subnet, err := netip.ParsePrefix(r.Subnet); err == nil {
			subnets = append(subnets, subnet)
		}
	}
	return subnets
}
