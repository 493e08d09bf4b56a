// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns a list of valid but misleading keys of the object "ipam". A misleading key either has no effect, or its name suggests
// another effect. Findings does no I/O.
func Findings(config []byte) []plugin.Finding { return plugin.UnknownKeys(config, "ipam", rawConfig{}) }

// Subnets returns the subnets in a configuration. Subnets omits each subnet that is invalid or unknown. The argument podCIDRs contains the
// node's CIDRs. Subnets does no I/O.
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
