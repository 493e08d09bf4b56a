// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/netip"

	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/plugin"
)

// capabilities maps a feature to the runtime's capability that it needs.
func capabilities() map[string]string {
	return map[string]string{portmap: "portMappings", bandwidth: "bandwidth"}
}

// bridgeConf has the keys of the first plugin that the demo reads.
type bridgeConf struct {
	IsGateway        bool            `json:"isGateway"`
	IsDefaultGateway bool            `json:"isDefaultGateway"`
	IPMasq           bool            `json:"ipMasq"`
	IPAM             json.RawMessage `json:"ipam"`
}

// notPromised returns the features that a configuration does not request. The demo skips their steps.
func notPromised(c *chain.Chain) map[string]string {
	lacks := map[string]string{}
	for feature, capability := range capabilities() {
		if !c.Provides(capability) {
			lacks[feature] = "no plugin of the conflist has the capability " + capability
		}
	}
	first := c.List.Plugins[0]
	var conf bridgeConf
	if !plugin.Runs(first.Network.Type, "bridge") || json.Unmarshal(first.Bytes, &conf) != nil {
		return lacks
	}
	if !conf.IsGateway && !conf.IsDefaultGateway {
		lacks[gateway] = "the conflist has no isGateway"
	}
	if !conf.IPMasq {
		lacks[masquerading] = "the conflist has no ipMasq"
	}
	for family, found := range families(conf.IPAM) {
		if !found {
			lacks[family] = "the conflist gives no " + family + " addresses"
		}
	}
	return lacks
}

// families returns the address families of the subnets in an IPAM configuration.
func families(ipam json.RawMessage) map[string]bool {
	found := map[string]bool{ipv4: false, ipv6: false}
	var conf any
	if json.Unmarshal(ipam, &conf) == nil {
		walk(conf, func(text string) {
			prefix, err := netip.ParsePrefix(text)
			switch {
			case err != nil:
			case prefix.Addr().Is4():
				found[ipv4] = true
			default:
				found[ipv6] = true
			}
		})
	}
	return found
}

// walk calls visit for every string in a JSON value, except in routes.
func walk(value any, visit func(string)) {
	switch v := value.(type) {
	case string:
		visit(v)
	case []any:
		for _, item := range v {
			walk(item, visit)
		}
	case map[string]any:
		for key, item := range v {
			if key != "routes" {
				walk(item, visit)
			}
		}
	}
}
