// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"maps"
	"strings"

	"github.com/containernetworking/cni/pkg/version"
	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
)

const schemaHelp = `Print the JSON Schema of a network configuration with Podlace's plugins, for editors:
they complete keys, and mark misspelt ones. Plugins of other projects are not checked.

For Visual Studio Code, in settings.json:

  "json.schemas": [{"fileMatch": ["*.conflist"], "url": "file:///PATH/conflist.schema.json"}],
  "files.associations": {"*.conflist": "json"}`

func newSchema() *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of network configurations",
		Long:    schemaHelp,
		Example: "  podlace schema >conflist.schema.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printJSON(cmd.OutOrStdout(), conflistSchema())
		},
	}
}

// conflistSchema returns the JSON Schema of a network configuration list (SPEC.md, section 1).
func conflistSchema() plugin.Schema {
	described := descriptions()
	var rules []plugin.Schema
	definitions := plugin.Schema{}
	for kind, keys := range validate.Keys() {
		s := plugin.SchemaOf(keys, described(kind))
		if kind == "bridge" || kind == "sriov" {
			s["properties"].(plugin.Schema)["ipam"] = plugin.Schema{"$ref": "#/$defs/ipam"}
		}
		definitions[kind] = s.Merge(plugin.Schema{"properties": commonProperties(described("plugin"))})
	}
	definitions[plugin.PodType] = podSchema(definitions)
	hostLocal := plugin.SchemaOf(hostlocal.Keys(), described("host-local"))["properties"].(plugin.Schema)["ipam"].(plugin.Schema)
	definitions["host-local"] = hostLocal
	definitions["ipam"] = plugin.Schema{"type": "object", "required": []string{"type"}, "if": ofType("host-local"),
		"then": plugin.Schema{"$ref": "#/$defs/host-local"}}
	for _, kind := range []string{"bridge", "portmap", "bandwidth", "sriov", plugin.PodType} {
		rules = append(rules, plugin.Schema{"if": ofType(kind), "then": plugin.Schema{"$ref": "#/$defs/" + kind}})
	}
	return plugin.Schema{
		"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "CNI network configuration list with Podlace's plugins",
		"type": "object", "required": []string{"cniVersion", "name", "plugins"}, "$defs": definitions,
		"properties": plugin.Schema{
			"cniVersion":   plugin.Schema{"enum": version.All.SupportedVersions()},
			"cniVersions":  plugin.Schema{"type": "array", "items": plugin.Schema{"enum": version.All.SupportedVersions()}},
			"name":         plugin.Schema{"type": "string", "pattern": "^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"},
			"disableCheck": plugin.Schema{"type": "boolean"}, "disableGC": plugin.Schema{"type": "boolean"},
			"loadOnlyInlinedPlugins": plugin.Schema{"type": "boolean"},
			"plugins": plugin.Schema{"type": "array", "minItems": 1,
				"items": plugin.Schema{"type": "object", "required": []string{"type"}, "allOf": rules}},
		},
	}
}

// podSchema returns the JSON Schema of podlace-pod: the keys of bridge, and a section for each other part.
func podSchema(definitions plugin.Schema) plugin.Schema {
	of := func(kind string) plugin.Schema {
		return definitions[kind].(plugin.Schema)["properties"].(plugin.Schema)
	}
	properties := maps.Clone(of("bridge"))
	for _, kind := range []string{"portmap", "bandwidth"} {
		section := maps.Clone(of(kind))
		for _, key := range plugin.CommonKeys() {
			delete(section, key)
		}
		properties[kind] = plugin.Schema{"type": "object", "properties": section, "additionalProperties": false}
	}
	return plugin.Schema{"type": "object", "properties": properties, "additionalProperties": false}
}

// ofType returns a JSON Schema for a plugin's configuration, with or without the prefix "podlace-" of its type.
func ofType(kind string) plugin.Schema {
	return plugin.Schema{"properties": plugin.Schema{"type": plugin.Schema{"enum": plugin.TypesOf(kind)}},
		"required": []string{"type"}}
}

// commonProperties returns the JSON Schema of the keys that every plugin has.
func commonProperties(describe func(path string) string) plugin.Schema {
	properties := plugin.Schema{}
	for _, key := range plugin.CommonKeys() {
		properties[key] = plugin.Schema{}
	}
	properties["type"] = plugin.Schema{"type": "string"}
	properties["logFile"] = plugin.Schema{"type": "string", "pattern": "^(/.*|journal)?$", "description": describe("logFile")}
	properties["logLevel"] = plugin.Schema{"enum": []string{"", "debug", "info", "warning", "error", "panic"},
		"description": describe("logLevel")}
	properties["capabilities"] = plugin.Schema{"type": "object", "additionalProperties": plugin.Schema{"type": "boolean"}}
	return properties
}

// descriptions returns a function that describes a plugin's keys, from the tables in the documents.
func descriptions() func(kind string) func(path string) string {
	all := entries()
	return func(kind string) func(string) string {
		return func(path string) string {
			for _, e := range all {
				if e.subject != kind || len(e.facts) == 0 || e.facts[len(e.facts)-1][0] != "Meaning" || !e.matchesName(path) {
					continue
				}
				var parts []string
				for _, fact := range e.facts {
					parts = append(parts, fact[0]+": "+fact[1])
				}
				return strings.Join(parts, ". ")
			}
			return ""
		}
	}
}
