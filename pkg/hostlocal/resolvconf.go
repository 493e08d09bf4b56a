// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// readResolvConf reads a file in the syntax of resolv.conf(5). Like the reference plugin, it neither checks nor changes the values.
func readResolvConf(path string) (types.DNS, error) {
	data, err := store.ReadFile(path) // resolv.conf is a symbolic link on many nodes
	if err != nil {
		return types.DNS{}, plugin.Errorf(plugin.CodeConfig, "ipam resolvConf: %w", err)
	}
	return parseResolvConf(string(data)), nil
}

func parseResolvConf(text string) types.DNS {
	var dns types.DNS
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		switch fields[0] {
		case "nameserver":
			dns.Nameservers = append(dns.Nameservers, fields[1])
		case "domain":
			dns.Domain = fields[1]
		case "search":
			dns.Search = append(dns.Search, fields[1:]...)
		case "options":
			dns.Options = append(dns.Options, fields[1:]...)
		}
	}
	return dns
}
