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

// Findings returns a list of valid but misleading settings. A setting is misleading if it has no effect, or if its name suggests another
// effect. The argument `pods` contains the subnets of the pods' addresses. The argument `node` contains the subnets behind the node's
// links. Findings does no I/O.
func Findings(config []byte, pods []netip.Prefix, node []kernel.Subnet) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), unloggedFindings(config, pods, node)...)
}

// unloggedFindings returns the misleading settings, except those for which another part of ADD already logs a warning.
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
		name = defaultBridge
	}
	own := []string{name, fmt.Sprintf("%s.%d", name, raw.Vlan)}
	others := slices.DeleteFunc(slices.Clone(node), func(s kernel.Subnet) bool { return slices.Contains(own, s.Link) })
	return append(found, overlaps(pods, others)...)
}

// overlaps() returns a finding for each pod subnet that overlaps a subnet behind another link. A larger subnet behind a router is no
// conflict, because the route to the node's own pods is more specific. For example, the larger subnet may contain the pods of all nodes.
// The first address of the pods' subnet may belong to the tunnel between nodes. An overlap with the first address is no conflict, because
// no pod gets this address.
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

// logFindings logs the findings once for each new bridge, and once for each new subnet on a bridge. Without IPAM, the bridge may belong to
// another program, so logFindings never treats the bridge as new. Without IPAM, a note file prevents repeated logs.
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
