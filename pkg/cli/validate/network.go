// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/strict"
)

// The type network contains the data for a comparison of network configurations.
type network struct {
	part
	name    string
	kinds   []string // of its plugins so far
	subnets []subnet
}

// The type subnet is a subnet in a plugin's configuration, with the range of addresses that the plugin assigns.
type subnet struct {
	netip.Prefix
	at          strict.Place
	bridge      string     // "" for other plugins than bridge
	first, last netip.Addr // invalid if unknown
}

// subnetsOf returns the subnets of a configuration. Each subnet contains the address range that host-local parsed.
func (t part) subnetsOf(path string, p plugin.Part, podCIDRs []netip.Prefix, parsed hostlocal.Config) (list []subnet) {
	ranges := slices.Concat(parsed.Sets...)
	for _, prefix := range hostlocal.Subnets(p.Config, podCIDRs) {
		s := subnet{Prefix: prefix, at: t.root.At(strings.Trim(path+".ipam", "."))}
		t.root.Walk(func(v strict.Value, _ bool) {
			if v.Name == "subnet" && v.Data == prefix.String() && strings.HasPrefix(v.Key, s.at.Key) {
				s.at = v.Place
			}
		})
		if p.Kind == "bridge" {
			s.bridge = bridge.NameIn(p.Config)
		}
		if i := slices.IndexFunc(ranges, func(r hostlocal.Range) bool { return r.Subnet == prefix.Masked() }); i >= 0 {
			s.first, s.last = ranges[i].Start, ranges[i].End
			ranges = slices.Delete(ranges, i, i+1)
		}
		list = append(list, s)
	}
	return list
}

// The method clashes() reports whether two subnets of different networks conflict. Networks of the same bridge may divide a subnet with
// rangeStart and rangeEnd.
func (s subnet) clashes(other subnet) bool {
	apart := s.first.IsValid() && other.first.IsValid() && (s.last.Less(other.first) || other.last.Less(s.first))
	return s.Overlaps(other.Prefix) && (!apart || s.bridge != other.bridge)
}

// The method network() checks a network configuration. The configuration contains either a list of plugins or a single plugin.
func (c *checker) network(t part) {
	var list struct {
		CNIVersion string            `json:"cniVersion"`
		Name       string            `json:"name"`
		Type       string            `json:"type"`
		Plugins    []json.RawMessage `json:"plugins"`
	}
	if err := plugin.Decode(t.data, &list); err != nil {
		c.add(t, t.root.At(plugin.KeyOf(err)), codeOf(err), true, "%v", err)
		return
	}
	before := len(c.problems)
	if err := utils.ValidateNetworkName(list.Name); err != nil {
		c.add(t, t.root.At("name"), networkName, true, "%s: want letters, digits, '_', '.' and '-'",
			strings.TrimSuffix(err.Msg, ":"))
	}
	if !slices.Contains(version.All.SupportedVersions(), list.CNIVersion) {
		c.add(t, t.root.At("cniVersion"), cniVersion, list.CNIVersion != "", "%q: want one of %s", list.CNIVersion,
			strings.Join(version.All.SupportedVersions(), ", "))
	}
	if list.Type == "" && len(list.Plugins) == 0 {
		c.add(t, t.root.At("plugins"), noPlugin, true, "there is no plugin")
	}
	for _, f := range Config(t.data, c.node) {
		c.add(t, t.root.At(f.Key), f.Code, false, "%s", f.Text)
	}
	n := network{part: t, name: list.Name}
	if list.Type != "" {
		c.entry(&n, "", list.CNIVersion, t.data)
	}
	for i, config := range list.Plugins {
		c.entry(&n, fmt.Sprintf("plugins[%d]", i), list.CNIVersion, config)
	}
	c.networks = append(c.networks, n)
	if slices.ContainsFunc(c.problems[before:], func(p Problem) bool { return p.Error }) || len(list.Plugins) == 0 {
		return
	}
	if _, err := libcni.NetworkConfFromBytes(t.data); err != nil {
		err = plugin.Errorf(plugin.CodeDecode, "runtimes refuse the configuration: %w", err)
		c.add(t, t.root.At("plugins"), codeOf(err), true, "%v", err)
	}
}

// The method entry() checks each plugin of an entry of a conflist as its ADD would.
func (c *checker) entry(n *network, path, version string, config []byte) {
	kind := plugin.Kind(ipam.Type(config))
	if kind == "" {
		c.add(n.part, n.root.At(path), noPlugin, true, "type is missing")
		return
	}
	c.misspelt(n, path+".type", ipam.Type(config))
	c.misspelt(n, path+".ipam.type", ipam.Type(ipam.Object(config)))
	if slices.Contains(plugin.Kinds(), kind) {
		c.refused(n, path, plugin.Part{Config: config}, plugin.CheckLogging(config))
		if kind == plugin.PodType {
			_, err := plugin.Split(config)
			c.refused(n, path, plugin.Part{Config: config}, err)
		}
	}
	for _, p := range plugin.Parts(config) {
		if slices.Contains(n.kinds, p.Kind) && slices.Contains(plugin.Kinds(), p.Kind) {
			c.add(n.part, n.root.At(path), pluginTwice, true, "another entry of this network runs %s already, and both would write the same record", p.Kind)
		}
		n.kinds = append(n.kinds, p.Kind)
		c.plugin(n, path, version, p)
	}
}

func (c *checker) plugin(n *network, path, declared string, p plugin.Part) {
	if p.Kind == "sriov" && n.multus {
		p.Config = withDeviceID(p.Config)
	}
	r := &plugin.Request{Plugin: p.Kind, Verb: "ADD", Network: n.name, ContainerID: "validate", IfName: "eth0", CNIVersion: declared,
		Config: p.Config, Log: slog.New(slog.DiscardHandler)}
	c.refused(n, path, p, parse(r, p.Kind))
	if plugin.Kind(ipam.Type(ipam.Object(p.Config))) == "host-local" {
		parsed, err := hostlocal.Parse(r)
		n.subnets = append(n.subnets, n.subnetsOf(path, p, c.node.PodCIDRs, parsed)...)
		if plugin.KeyOf(err) == "" {
			err = plugin.WithKey("ipam", err)
		}
		if !hostlocal.NoPodCIDR(err) {
			c.refused(n, path, p, err)
		}
	}
	if p.Kind == "bandwidth" && slices.Contains(version.All.SupportedVersions(), declared) {
		if err := bandwidth.Plugin().CheckVersion(r.Verb, declared); err != nil {
			c.add(n.part, n.root.At("cniVersion"), cniVersion, true, "bandwidth: %v", err)
		}
	}
}

// refused() reports the errors of a plugin at the keys that they carry.
func (c *checker) refused(n *network, path string, p plugin.Part, errs ...error) {
	for _, err := range errs {
		if err != nil {
			key := strings.Trim(path+"."+p.Key(plugin.KeyOf(err)), ".")
			c.add(n.part, n.root.At(key), codeOf(err), true, "%v", err)
		}
	}
}

// misspelt() reports a type that resembles a plugin of Podlace. The type may also belong to a plugin of another project, so the finding is
// only a warning.
func (c *checker) misspelt(n *network, path, name string) {
	kind := plugin.Kind(name)
	near := cmp.Or(strict.Nearest(kind, plugin.Kinds()), strict.Nearest(name, plugin.Kinds()))
	if near != "" && near != kind {
		c.add(n.part, n.root.At(path), misspeltPlugin, false, "%q is no plugin of Podlace: did you mean %s?", name, near)
	}
}

// withDeviceID adds a device to a plugin's configuration in a NetworkAttachmentDefinition, as Multus does.
func withDeviceID(config []byte) []byte {
	var keys map[string]any
	if json.Unmarshal(config, &keys) != nil || keys["deviceID"] != nil {
		return config
	}
	keys["deviceID"] = "0000:00:00.0"
	more, err := json.Marshal(keys)
	if err != nil {
		return config
	}
	return more
}

// The function parse() parses the configuration of a Podlace plugin. For plugins of other projects, parse() returns nil.
func parse(r *plugin.Request, kind string) (err error) {
	switch kind {
	case "bridge":
		_, err = bridge.Parse(r)
	case "portmap":
		_, err = portmap.Parse(r)
	case "bandwidth":
		_, err = bandwidth.Parse(r)
	case "sriov":
		err = sriov.Check(r)
	case "loopback":
	default:
		return nil
	}
	return err
}

// The method clashes() reports networks that have the same name, and networks that have the same subnet on different bridges.
func (c *checker) clashes() {
	for i, later := range c.networks {
		for _, earlier := range c.networks[:i] {
			if later.name == earlier.name {
				c.add(later.part, later.root.At("name"), networkNameTaken, false, "network %q is in %s already: runtimes take the file that sorts first",
					later.name, earlier.file)
				break
			}
			c.clashOfSubnets(earlier, later)
		}
	}
}

func (c *checker) clashOfSubnets(earlier, later network) {
	for _, a := range earlier.subnets {
		for _, b := range later.subnets {
			if a.clashes(b) {
				c.add(later.part, b.at, plugin.SubnetOverlap, true, "subnet %s overlaps %s of network %q in %s: the leases are per network, so that two pods "+
					"get one address", b.Prefix, a.Prefix, earlier.name, earlier.file)
			}
		}
	}
}
