// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/ipam"
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

// multusDevice returns the configuration of sriov with a device as Multus passes it, and reports the lack of the annotation for that.
func (c *checker) multusDevice(n *network, path string, config json.RawMessage) json.RawMessage {
	var keys map[string]json.RawMessage
	if json.Unmarshal(config, &keys) != nil || keys["deviceID"] != nil || keys["pciBusID"] != nil {
		return config
	}
	if n.resource == "" && keys["resources"] == nil {
		c.add(n.part, n.root.At(path), codeOf(plugin.KeyErrorf("", "")), true, "Multus passes no VF: add the annotation %s, such as example.com/fast", resourceName)
	}
	return ipam.WithKey(config, "deviceID", json.RawMessage(`"0000:00:00.0"`))
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
