// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/strict"
)

// clashes reports networks of the same name, and of the same subnet on different bridges. The name of a NetworkAttachmentDefinition's
// network does not select it.
func (c *checker) clashes() {
	for i, later := range c.networks {
		for _, earlier := range c.networks[:i] {
			switch {
			case later.name != earlier.name:
				c.clashOfSubnets(earlier, later)
				c.clashOfBridges(earlier, later)
			case later.nad == "" && earlier.nad == "" && later.list == nil && earlier.list == nil:
				c.add(later.part, later.root.At("name"), networkNameTaken, false, "network %q is in %s already: runtimes take the file that sorts first",
					later.name, earlier.file)
			}
		}
	}
}

func (c *checker) clashOfSubnets(earlier, later network) {
	for _, a := range earlier.subnets {
		for _, b := range later.subnets {
			if !a.clashes(b) {
				continue
			}
			effect := "the leases are per network, so that two pods get one address"
			shared := a.bridge != "" && a.bridge == b.bridge && a.leases == b.leases
			if shared {
				effect = "either network can use up the range, as ADD skips what the other one has leased"
			}
			c.add(later.part, b.at, plugin.SubnetOverlap, !shared, "subnet %s overlaps %s of network %q in %s: %s", b.Prefix, a.Prefix, earlier.name,
				earlier.file, effect)
		}
	}
}

// clashOfBridges reports what two networks of one bridge cannot have both: two gateways, or settings of the whole bridge that differ.
func (c *checker) clashOfBridges(earlier, later network) {
	a, b := earlier.bridged, later.bridged
	if a == nil || b == nil || a.Bridge != b.Bridge {
		return
	}
	if a.MTU != b.MTU || a.AutoMTU != b.AutoMTU || a.Promisc != b.Promisc {
		c.add(later.part, later.bridge, bridgeDiffers, false, "mtu or promiscMode differs from network %q in %s, and both are of the whole bridge %s",
			earlier.name, earlier.file, b.Bridge)
	}
	if !a.Gateway || !b.Gateway || b.ForceAddress {
		return
	}
	for _, s := range later.subnets {
		same := func(other subnet) bool { return other.Masked() == s.Masked() }
		conflicts := func(other subnet) bool {
			return bridge.GatewaysConflict(other.Prefix, s.Prefix) && !other.Overlaps(s.Prefix)
		}
		if i := slices.IndexFunc(earlier.subnets, conflicts); i >= 0 && !slices.ContainsFunc(earlier.subnets, same) {
			c.add(later.part, s.at, codeOf(plugin.Errorf(plugin.CodeAddressTaken, "")), true, "%s has the gateway of %s of network %q in %s: give this network a bridge of its own",
				b.Bridge, earlier.subnets[i].Prefix, earlier.name, earlier.file)
		}
	}
}

// edges reports ranges with an address that hosts cannot use: the first of a subnet, or the last of an IPv4 subnet.
func (c *checker) edges(n *network, path string, parsed hostlocal.Config) {
	for _, r := range slices.Concat(parsed.Sets...) {
		if r.Subnet.Addr().BitLen()-r.Subnet.Bits() < 2 { // RFC 3021, RFC 6164: no address is reserved
			continue
		}
		for _, a := range []netip.Addr{r.Start, r.End} {
			last := a.Is4() && !r.Subnet.Contains(a.Next())
			if a == r.Subnet.Addr() || last {
				c.add(n.part, n.root.At(strings.Trim(path+".ipam", ".")), rangeEdge, false,
					"a pod may get %s, the network or broadcast address of %s: change rangeStart or rangeEnd", a, r.Subnet)
			}
		}
	}
}

// resourceName is the annotation of a NetworkAttachmentDefinition with the resource whose devices Multus passes to the plugin.
const resourceName = "k8s.v1.cni.cncf.io/resourceName"

// hasKey reports whether a configuration has one of these keys, or is not valid.
func hasKey(config json.RawMessage, names ...string) bool {
	var keys map[string]json.RawMessage
	return json.Unmarshal(config, &keys) != nil || slices.ContainsFunc(names, func(name string) bool { return keys[name] != nil })
}

// getsDevice reports whether Multus passes a device to the plugin, because it is sriov in a NetworkAttachmentDefinition and names none.
func (n *network) getsDevice(p plugin.Part) bool {
	return p.Kind == "sriov" && n.nad != "" && !hasKey(p.Config, "deviceID", "pciBusID")
}

// noResource reports a NetworkAttachmentDefinition without the annotation by which Multus passes a device to sriov.
func (c *checker) noResource(n *network, path string, config json.RawMessage) {
	if n.resource == "" && !hasKey(config, "resources") {
		c.add(n.part, n.root.At(path), codeOf(plugin.KeyErrorf("", "")), true, "Multus passes no VF: add the annotation %s, such as example.com/fast",
			resourceName)
	}
}

// gateways reports ranges whose gateway is in no subnet of the pod, without a route to it with scope link.
func (c *checker) gateways(n *network, path string, parsed hostlocal.Config) {
	ranges := slices.Concat(parsed.Sets...)
	for _, r := range ranges {
		reached := slices.ContainsFunc(ranges, func(other hostlocal.Range) bool { return other.Subnet.Contains(r.Gateway) }) ||
			slices.ContainsFunc(parsed.Routes, func(route *types.Route) bool {
				return route.Scope != nil && *route.Scope != 0 && route.Dst.Contains(r.Gateway.AsSlice())
			})
		if !r.Gateway.IsValid() || r.Gateway.IsLinkLocalUnicast() || reached {
			continue
		}
		at := n.root.At(strings.Trim(path+".ipam", "."))
		n.root.Walk(func(v *strict.Value) {
			if v.Name == "gateway" && v.Data == r.Gateway.String() && strings.HasPrefix(v.Key, at.Key) {
				at = v.Place
			}
		})
		c.add(n.part, at, gatewayOutside, false, "gateway %s is in no subnet of the pod: ADD fails with code 7 as soon as a route uses it", r.Gateway)
	}
}

// definition is a NetworkAttachmentDefinition.
type definition struct{ namespace, name, resource string }

// podNetworks is what a pod tells Multus.
type podNetworks struct {
	part
	namespace string
	networks  strict.Value // the annotation
	resources []string     // in the limits of the containers
}

// attachments reports pods whose networks, or their resources, do not match the NetworkAttachmentDefinitions in the files. Without
// any, they may be in the cluster.
func (c *checker) attachments() {
	if len(c.definitions) == 0 {
		return
	}
	for _, pod := range c.pods {
		for _, name := range networkNames(pod.networks.Text(), pod.namespace) {
			i := slices.IndexFunc(c.definitions, func(d definition) bool { return d.namespace+"/"+d.name == name })
			switch {
			case i < 0:
				c.add(pod.part, pod.networks.Place, podNetwork, false, "no NetworkAttachmentDefinition %s is in these files", name)
			case c.definitions[i].resource != "" && !slices.Contains(pod.resources, c.definitions[i].resource):
				near := strict.Nearest(c.definitions[i].resource, pod.resources)
				if near != "" {
					near = ", but " + near
				}
				c.add(pod.part, pod.networks.Place, podNetwork, false, "network %s needs %s in the limits of a container, which have none%s", name,
					c.definitions[i].resource, near)
			}
		}
	}
}

// networkNames returns the networks in the annotation k8s.v1.cni.cncf.io/networks with their namespaces: a JSON list of objects, or names
// with commas between them.
func networkNames(text, namespace string) (names []string) {
	var list []struct{ Name, Namespace string }
	if json.Unmarshal([]byte(text), &list) != nil {
		for word := range strings.SplitSeq(text, ",") {
			word, _, _ = strings.Cut(strings.TrimSpace(word), "@")
			space, name, ok := strings.Cut(word, "/")
			if !ok {
				space, name = "", word
			}
			list = append(list, struct{ Name, Namespace string }{name, space})
		}
	}
	for _, n := range list {
		if n.Name != "" {
			names = append(names, cmp.Or(n.Namespace, namespace)+"/"+n.Name)
		}
	}
	return names
}
