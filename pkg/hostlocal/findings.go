// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns the valid but misleading keys of the object "ipam": those without effect, or whose name suggests another one. It does no
// I/O.
func Findings(config []byte) []plugin.Finding { return plugin.UnknownKeys(config, "ipam", rawConfig{}) }

// Subnets returns the subnets in a configuration that are valid and known. The argument podCIDRs contains the node's CIDRs. It does no I/O.
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
