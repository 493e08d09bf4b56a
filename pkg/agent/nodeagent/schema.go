// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/plugin"
)

func (c *command) newSchema() *cobra.Command {
	return &cobra.Command{Use: "schema", Short: "Print the JSON Schema of the configuration file", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			text, err := json.MarshalIndent(configSchema(), "", "  ")
			if err == nil {
				_, err = c.stdout.Write(append(text, '\n'))
			}
			return err
		}}
}

// configSchema returns the JSON Schema of the configuration file: the keys of config, their types, and those limits of parseConfig that a
// schema can express.
func configSchema() plugin.Schema {
	s := plugin.SchemaOf(config{}, func(string) string { return "" })
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "Configuration of podlace-node"
	limit := func(in plugin.Schema, key string, limits plugin.Schema) {
		for name, value := range limits {
			in["properties"].(plugin.Schema)[key].(plugin.Schema)[name] = value
		}
	}
	vxlan := s["properties"].(plugin.Schema)["vxlan"].(plugin.Schema)
	limit(vxlan, "vni", plugin.Schema{"minimum": 1, "maximum": maxVNI})
	limit(vxlan, "port", plugin.Schema{"minimum": 1, "maximum": maxPort})
	limit(s, "mtu", plugin.Schema{"anyOf": []plugin.Schema{{"const": 0}, {"minimum": minMTU, "maximum": maxMTU}}})
	limit(s, "offLink", plugin.Schema{"enum": offLinks()})
	limit(s, "adopt", plugin.Schema{"items": plugin.Schema{"type": "string", "pattern": "^(boot|static|[0-9]{1,3})$"}})
	limit(s, "binDir", plugin.Schema{"pattern": "^(/|$)"})
	limit(s, "confDir", plugin.Schema{"pattern": "^(/|$)"})
	limit(s, "apiServer", plugin.Schema{"pattern": "^(https?://.|$)"})
	return s
}
