// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns settings that are valid but misleading, because they have no effect or another one than their name suggests. pods are
// the subnets of the pods' addresses, node those behind the node's links. It does no I/O.
func Findings(config []byte, pods []netip.Prefix, node []kernel.Subnet) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), unloggedFindings(config, pods, node)...)
}

// unloggedFindings returns the findings without those that another part of ADD logs.
func unloggedFindings(config []byte, pods []netip.Prefix, node []kernel.Subnet) []plugin.Finding {
	found := plugin.Capabilities(config, "", "")
	var raw rawConfig
	if json.Unmarshal(config, &raw) != nil {
		return found
	}
	var keys []string
	for _, k := range []struct {
		name string
		on   bool
	}{{"isGateway", raw.IsGateway}, {"isDefaultGateway", raw.IsDefaultGateway},
		{"ipMasq", raw.IPMasq != nil && (trueByDefault(raw.IPMasq.V4) || trueByDefault(raw.IPMasq.V6))}} {
		if k.on {
			keys = append(keys, k.name)
		}
	}
	if ipam.Type(raw.IPAM) == "" {
		if len(keys) > 0 {
			found = append(found, plugin.Finding{Key: strings.Join(keys, ", "), Code: plugin.WithoutIPAM,
				Text: "no effect without ipam: the pod gets no address, " +
					"the bridge becomes no gateway, and nothing is masqueraded; name an IPAM plugin, such as host-local"})
		}
		return found
	}
	if !raw.IsGateway && !raw.IsDefaultGateway {
		return found // the bridge leads to the network that has this subnet
	}
	name := raw.Bridge
	if name == "" {
		name = ipam.DefaultBridge
	}
	own := []string{name, fmt.Sprintf("%s.%d", name, raw.Vlan)}
	others := slices.DeleteFunc(slices.Clone(node), func(s kernel.Subnet) bool { return slices.Contains(own, s.Link) })
	return append(found, overlaps(pods, others)...)
}

// overlaps returns a finding for each pod subnet that overlaps a subnet behind another link. A larger subnet behind a router, such as that
// of all nodes' pods, is no conflict, because the route to the node's own pods is more specific. Nor is the first address, which no pod
// gets: the tunnel between nodes may have it.
func overlaps(pods []netip.Prefix, others []kernel.Subnet) (found []plugin.Finding) {
	for _, pod := range pods {
		for _, other := range others {
			router := other.Via.IsValid() && other.Prefix.Bits() < pod.Bits()
			tunnel := other.Prefix.IsSingleIP() && other.Prefix.Addr() == pod.Masked().Addr()
			if !pod.Overlaps(other.Prefix) || router || tunnel {
				continue
			}
			found = append(found, plugin.Finding{Key: "ipam", Code: plugin.SubnetOverlap, Text: fmt.Sprintf("the pods' subnet %s overlaps %s: packets for a shared address "+
				"reach only one of the two links; connections and hostPorts to the other time out; choose another subnet", pod, other)})
		}
	}
	return found
}

// logFindings logs the findings once for each new bridge and each new subnet on a bridge. Without IPAM the bridge never counts as new,
// because it may be another program's; a note file then prevents repeated logs.
func (j *job) logFindings(l layer3) {
	if j.cfg.IPAM == "" {
		attachment.LogOnce(j.r, unloggedFindings(j.r.Config, nil, nil))
		return
	}
	if !j.fresh {
		return
	}
	node, err := j.host.Subnets()
	if err != nil {
		j.r.Log.Warn("the node's subnets cannot be read; conflicts with the pods' subnets are not reported", "error", err)
	}
	var pods []netip.Prefix
	for _, a := range l.Addresses {
		pods = append(pods, a.Masked())
	}
	j.r.LogFindings(unloggedFindings(j.r.Config, pods, node))
}
