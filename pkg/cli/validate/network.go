// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/store"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// network holds what is compared between network configurations.
type network struct {
	part
	name    string
	version string
	kinds   *[]string // of its plugins so far, with those in its folder
	subnets []subnet
	bridged *bridge.Config // of its bridge, or nil
	bridge  strict.Place   // of its entry
	hairpin strict.Place   // of "hairpinMode": false, or its zero value
}

// subnet is a subnet in a plugin's configuration, with the range that the plugin assigns.
type subnet struct {
	netip.Prefix
	at          strict.Place
	bridge      string     // "" for other plugins than bridge
	leases      string     // dataDir
	first, last netip.Addr // invalid if unknown
}

// subnetsOf returns a configuration's subnets, with the ranges that host-local parsed.
func (t part) subnetsOf(path string, p plugin.Part, podCIDRs []netip.Prefix, parsed hostlocal.Config) (list []subnet) {
	ranges := slices.Concat(parsed.Sets...)
	for _, prefix := range hostlocal.Subnets(p.Config, podCIDRs) {
		s := subnet{Prefix: prefix, leases: filepath.Dir(parsed.Dir), at: t.root.At(strings.Trim(path+".ipam", "."))}
		t.root.Walk(func(v *strict.Value) {
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

// clashes reports whether two subnets of different networks conflict. Networks of one bridge may divide a subnet with rangeStart and
// rangeEnd.
func (s subnet) clashes(other subnet) bool {
	apart := s.first.IsValid() && other.first.IsValid() && (s.last.Less(other.first) || other.last.Less(s.first))
	return s.Overlaps(other.Prefix) && (!apart || s.bridge != other.bridge)
}

// network checks a network configuration, which is a list of plugins or a single one.
func (c *checker) network(t part) {
	var list struct {
		CNIVersion string            `json:"cniVersion"`
		Name       string            `json:"name"`
		Type       string            `json:"type"`
		Plugins    []json.RawMessage `json:"plugins"`
	}
	path, n, before := t.file, network{part: t, kinds: new([]string)}, len(c.problems)
	c.refused(&n, "", plugin.Part{Config: t.data}, func(r *plugin.Request) error { return plugin.Decode(r.Config, &list) })
	if t.key != "" || !slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(path)) {
		path = map[bool]string{true: ".conf"}[list.Type != ""]
	}
	if t.list != nil { // it gives its plugins a name and a version
		list.Name, list.CNIVersion, n.kinds = t.list.name, t.list.version, t.list.kinds
	} else if t.nad != "" && list.Name == "" {
		list.Name = t.nad
	}
	if err := utils.ValidateNetworkName(list.Name); err != nil && t.list == nil && (list.Name != "" || t.root.Get("name").Text() == "") {
		c.add(t, t.root.At("name"), networkName, true, "%s: want letters, digits, '_', '.' and '-'", strings.TrimSuffix(err.Msg, ":"))
	}
	loaded, refusal := reconcile.Load(path, ipam.WithKey(t.data, "name", json.RawMessage(strconv.Quote(list.Name))))
	if refusal == nil && list.Type == "" {
		list.CNIVersion = loaded.CNIVersion
	}
	if t.list == nil && !slices.Contains(version.All.SupportedVersions(), list.CNIVersion) {
		c.add(t, t.root.At("cniVersion"), cniVersion, list.CNIVersion != "", "%q: want one of %s", list.CNIVersion,
			strings.Join(version.All.SupportedVersions(), ", "))
	}
	for _, f := range Config(t.data, c.node) {
		c.add(t, t.root.At(f.Key), f.Code, false, "%s", f.Text)
	}
	n.name, n.version = list.Name, list.CNIVersion
	if list.Type != "" {
		c.entry(&n, "", t.data)
	} else {
		c.list(path, &n, list.Plugins)
	}
	c.networks = append(c.networks, n)
	if refusal != nil && !slices.ContainsFunc(c.problems[before:], func(p Problem) bool { return p.Error }) {
		key := map[bool]string{true: "type", false: cmp.Or(plugin.KeyOf(refusal), "plugins")}[list.Type != "" && plugin.KeyOf(refusal) != ""]
		c.add(t, t.root.At(key), wrongType, true, "runtimes refuse the configuration: %v", refusal)
	}
}

// list checks what only a list has: keys that runtimes refuse, plugins, and the folder of its name, whose files runtimes add.
func (c *checker) list(path string, n *network, plugins []json.RawMessage) {
	for _, v := range reconcile.RefusedKeys(n.root) {
		c.add(n.part, v.Place, wrongType, true, "%s", v.Text)
	}
	for i, config := range plugins {
		c.entry(n, fmt.Sprintf("plugins[%d]", i), config)
	}
	files, _ := reconcile.FolderFiles(path, n.name, n.root.Get("loadOnlyInlinedPlugins").Data == true)
	for _, file := range files {
		if data, err := store.ReadFile(file); err == nil { // otherwise the refusal says so
			c.file(yamlfile.File{Name: file, Data: data}, n)
		}
	}
}

// entry checks each plugin of an entry of a conflist as its ADD would.
func (c *checker) entry(n *network, path string, config []byte) {
	name, before := ipam.Type(config), len(c.problems)
	kind := plugin.Kind(name)
	c.refused(n, path, plugin.Part{Config: config}, func(r *plugin.Request) (err error) {
		if slices.Contains(plugin.Kinds(), kind) {
			err = plugin.CheckLogging(r.Config)
		}
		if kind == plugin.PodType {
			_, split := plugin.Split(r.Config)
			err = errors.Join(err, split)
		}
		return errors.Join(plugin.Decode(r.Config, &types.PluginConf{}), err)
	})
	if kind == "" {
		if len(c.problems) == before {
			c.add(n.part, n.root.At(path), noPlugin, true, "type is missing")
		}
		return
	}
	if name == "tuning" && hasKey(config, "mac") {
		c.changedMAC(n, strings.Trim(path+".mac", "."))
	}
	c.misspelt(n, strings.Trim(path+".type", "."), name)
	c.misspelt(n, strings.Trim(path+".ipam.type", "."), ipam.Type(ipam.Object(config)))
	for _, p := range plugin.Parts(config) {
		if slices.Contains(*n.kinds, p.Kind) && slices.Contains(plugin.Kinds(), p.Kind) {
			c.add(n.part, n.root.At(path), pluginTwice, true, "another entry of this network runs %s already, and both would write the same record", p.Kind)
		}
		*n.kinds = append(*n.kinds, p.Kind)
		c.plugin(n, path, p)
	}
}

func (c *checker) plugin(n *network, path string, p plugin.Part) {
	if n.getsDevice(p) {
		c.noResource(n, path, p.Config)
		p.Config = ipam.WithKey(p.Config, "deviceID", json.RawMessage(`"0000:00:00.0"`)) // as Multus passes it
	}
	if len(*n.kinds) == 1 && slices.Contains([]string{"portmap", "bandwidth"}, p.Kind) {
		c.add(n.part, n.root.At(path), codeOf(plugin.KeyErrorf("", "")), true, "%s is a chained plugin: name it after a main plugin, such as bridge", p.Kind)
	}
	var bridged bridge.Config
	parsers := map[string]func(*plugin.Request) error{ // plugins of other projects have none
		"bridge": into(&bridged, bridge.Parse), "portmap": into(new(portmap.Config), portmap.Parse),
		"bandwidth": into(new(bandwidth.Config), bandwidth.Parse), "sriov": sriov.Check}
	if parse := parsers[p.Kind]; parse != nil {
		c.refused(n, path, p, parse)
	}
	if p.Kind == "bridge" {
		n.setBridge(path, p, &bridged)
	}
	if p.Kind == "portmap" {
		c.ownHostPort(n)
	}
	if plugin.Kind(ipam.Type(ipam.Object(p.Config))) == "host-local" {
		var parsed hostlocal.Config
		c.refused(n, path, p, into(&parsed, hostlocal.Parse))
		n.subnets = append(n.subnets, n.subnetsOf(path, p, c.node.PodCIDRs, parsed)...)
		c.edges(n, path, parsed)
		c.gateways(n, path, parsed)
		if bridged.Gateway {
			for _, r := range slices.Concat(parsed.Sets...) {
				if _, err := bridge.GatewayOf(r.Subnet, r.Gateway); err != nil {
					c.add(n.part, n.root.At(strings.Trim(path+".ipam", ".")), codeOf(err), true, "%v", err)
				}
			}
		}
	}
	if p.Kind == "bandwidth" && slices.Contains(version.All.SupportedVersions(), n.version) {
		if err := bandwidth.Plugin().CheckVersion("ADD", n.version); err != nil {
			c.add(n.part, n.root.At("cniVersion"), cniVersion, true, "bandwidth: %v", err)
		}
	}
}

// ownHostPort reports a bridge without hairpinMode before portmap.
func (c *checker) ownHostPort(n *network) {
	if n.hairpin.Line > 0 {
		c.add(n.part, n.hairpin, ownHostPort, false, "a pod does not reach its own hostPort: write true")
	}
}

// changedMAC reports a MAC that a later plugin sets although the bridge checks the sources of frames.
func (c *checker) changedMAC(n *network, key string) {
	if n.bridged != nil && (n.bridged.AntiSpoof || n.bridged.MACSpoofCheck) {
		c.add(n.part, n.root.At(key), macDropped, false, "bridge drops all frames of the pod, because antiSpoof and macspoofchk allow only the "+
			"MAC of its ADD: request the MAC by bridge's capability mac")
	}
}

// setBridge stores the bridge of a network, and the place of a hairpinMode that is false.
func (n *network) setBridge(path string, p plugin.Part, bridged *bridge.Config) {
	n.bridged, n.bridge = bridged, n.root.At(path)
	var keys struct{ HairpinMode *bool }
	if _ = json.Unmarshal(p.Config, &keys); keys.HairpinMode != nil && !bridged.Hairpin && !bridged.Promisc {
		n.hairpin = n.root.At(strings.Trim(path+"."+p.Key("hairpinMode"), "."))
	}
}

// into returns a parser that stores what a plugin's own parser returns.
func into[T any](to *T, parse func(*plugin.Request) (T, error)) func(*plugin.Request) error {
	return func(r *plugin.Request) (err error) {
		*to, err = parse(r)
		return err
	}
}

// refused reports the errors of a parser at the keys that they carry. It parses again without the refused values, because one error can
// hide others. A later error that names a refused value, or the object around it, is a consequence.
func (c *checker) refused(n *network, path string, p plugin.Part, parse func(*plugin.Request) error) {
	r := &plugin.Request{Plugin: p.Kind, Verb: "ADD", Network: n.name, ContainerID: "validate", IfName: "eth0", CNIVersion: n.version,
		Config: p.Config, Log: slog.New(slog.DiscardHandler)}
	said, earlier := map[string]bool{}, c.problems
	root, _ := (&strict.Report{}).ParseJSON(p.Config)
	var refused []string // names of values
	for before := -1; before < len(refused); r.Config, _ = json.Marshal(root) {
		before = len(refused)
		for _, err := range joined(parse(r)) {
			key, text := plugin.KeyOf(err), err.Error()
			follows := func(value string) bool {
				name := value[strings.LastIndex(value, ".")+1:]
				return strings.HasPrefix(value, key+".") || regexp.MustCompile(`\b`+name+`\b`).MatchString(text)
			}
			at := n.root.At(strings.Trim(path+"."+p.Key(key), "."))
			known := func(p Problem) bool { return p.Error && p.Place == n.place(at) }
			if !said[key+text] && !slices.ContainsFunc(refused[:before], follows) && !slices.ContainsFunc(earlier, known) &&
				!hostlocal.NoPodCIDR(err) {
				c.add(n.part, at, codeOf(err), true, "%s", strings.TrimSuffix(text+"; "+plugin.Hint(err), "; "))
			}
			said[key+text] = true
			root.Walk(func(v *strict.Value) {
				plain := listIndex.ReplaceAllString(v.Key, "") // as in errors of encoding/json
				if v.Data != nil && (strings.EqualFold(v.Key, key) || strings.EqualFold(plain, key)) {
					v.Data, refused = nil, append(refused, plain)
				}
			})
		}
	}
}

var listIndex = regexp.MustCompile(`\[\d+\]`)

// joined returns the errors that errors.Join has joined.
func joined(err error) (all []error) {
	if list, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range list.Unwrap() {
			all = append(all, joined(err)...)
		}
	} else if err != nil {
		all = []error{err}
	}
	return all
}

// misspelt reports a type that resembles a plugin of Podlace, because no pod starts without the plugin.
func (c *checker) misspelt(n *network, path, name string) {
	kind := plugin.Kind(name)
	near := cmp.Or(strict.Nearest(kind, plugin.Kinds()), strict.Nearest(name, plugin.Kinds()))
	if near != "" && near != kind {
		c.add(n.part, n.root.At(path), misspeltPlugin, true, "%q is no plugin of Podlace: did you mean %s?", name, near)
	}
}
