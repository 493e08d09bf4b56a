// SPDX-License-Identifier: Apache-2.0

// Package validate finds settings of a network configuration that are valid but do not do what their names suggest.
package validate

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/poolfile"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/strict"
)

// Node holds the facts about a node that a configuration is compared with. In the zero value all are unknown.
type Node struct {
	Subnets  []kernel.Subnet // subnets behind its links
	PodCIDRs []netip.Prefix

	Devices *pci.Snapshot
	Env     pool.Env // of Devices
}

// ThisNode reads the facts about this node. Missing podCIDRs are no error.
func ThisNode() (node Node, err error) {
	_, file, _ := nodefile.Read()
	node.PodCIDRs = file.PodCIDRs
	if node.Devices, node.Env, err = poolfile.Scan(pci.Sysfs); err != nil {
		return node, err
	}
	host, err := kernel.Host()
	if err != nil {
		return node, err
	}
	defer host.Close()
	node.Subnets, err = host.Subnets()
	return node, err
}

// Config returns the findings for a list of plugins or for one plugin. It does no I/O.
func Config(data []byte, node Node) []plugin.Finding {
	var list struct {
		Type    string            `json:"type"`
		Plugins []json.RawMessage `json:"plugins"`
	}
	_ = json.Unmarshal(data, &list) // the rest of a value of another type
	found := duplicateKeys(data)
	if list.Type != "" {
		return append(found, findings(data, node)...)
	}
	found = append(found, plugin.UnknownKeys(data, "", struct{}{})...)
	for i, config := range list.Plugins {
		for _, f := range findings(config, node) {
			f.Key = fmt.Sprintf("plugins[%d].%s", i, f.Key)
			found = append(found, f)
		}
	}
	return found
}

// findings returns the findings for one entry of a conflist, each with its key.
func findings(entry []byte, node Node) (found []plugin.Finding) {
	parts := plugin.Parts(entry)
	for _, p := range parts {
		if p.Unused {
			continue
		}
		for _, f := range ofPlugin(p, node) {
			if f.Code == plugin.UnknownKey && len(parts) > 1 {
				f = inSection(f, parts)
			}
			f.Key = p.Key(f.Key)
			found = append(found, f)
		}
	}
	return found
}

// Keys returns the configuration of each plugin of a chain as a struct with its keys, by the plugin's kind.
func Keys() map[string]any {
	return map[string]any{"bridge": bridge.Keys(), "portmap": portmap.Keys(), "bandwidth": bandwidth.Keys(), "sriov": sriov.Keys()}
}

// inSection improves the hint about an unknown key of podlace-pod that is the misspelt name of a section or belongs to another.
func inSection(f plugin.Finding, parts []plugin.Part) plugin.Finding {
	keys := Keys()
	object, _ := json.Marshal(map[string]any{f.Key: nil})
	var sections []string
	for _, p := range parts {
		if len(plugin.UnknownKeys(object, "", keys[p.Kind])) == 0 {
			f.Text = "unknown key is ignored here: write it as " + p.Key(f.Key)
			return f
		}
		if p.Key(f.Key) != f.Key {
			sections = append(sections, p.Kind)
		}
	}
	if near := strict.Nearest(f.Key, sections); near != "" {
		f.Text = "unknown key is ignored; did you mean " + near + "?"
	}
	return f
}

// keysAsCapabilities reports keys of a plugin that stand below capabilities, where they have no effect.
func keysAsCapabilities(p plugin.Part) (found []plugin.Finding) {
	if Keys()[p.Kind] == nil {
		return nil
	}
	var config struct{ Capabilities map[string]json.RawMessage }
	_ = json.Unmarshal(p.Config, &config) // ADD reports another type
	keys := plugin.Fields(reflect.TypeOf(Keys()[p.Kind]))
	for _, key := range slices.Sorted(maps.Keys(config.Capabilities)) {
		if _, ok := keys[key]; ok && !plugin.IsCapability(key) {
			found = append(found, plugin.Finding{Key: strict.Under("capabilities", key), Code: plugin.UnknownCapability,
				Text: "this is a key of " + p.Kind + " and no capability: write it beside capabilities"})
		}
	}
	return found
}

func ofPlugin(p plugin.Part, node Node) (found []plugin.Finding) {
	var pods []netip.Prefix
	if plugin.Kind(ipam.Type(ipam.Object(p.Config))) == "host-local" {
		pods = hostlocal.Subnets(p.Config, node.PodCIDRs)
		found = hostlocal.Findings(p.Config)
	}
	of := map[string]func([]byte) []plugin.Finding{"portmap": portmap.Findings, "bandwidth": bandwidth.Findings,
		"sriov":    func(config []byte) []plugin.Finding { return sriov.Findings(config, node.Devices) },
		"bridge":   func(config []byte) []plugin.Finding { return bridge.Findings(config, pods, node.Subnets) },
		"loopback": func(config []byte) []plugin.Finding { return plugin.UnknownKeys(config, "", struct{}{}) }}[p.Kind]
	if of == nil {
		return append(plugin.Capabilities(p.Config, "", ""), found...)
	}
	return slices.Concat(of(p.Config), keysAsCapabilities(p), found)
}
