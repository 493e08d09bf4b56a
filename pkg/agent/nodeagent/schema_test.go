// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/podlace/podlace/pkg/plugin"
)

// TestSchema compares the schema in conf/schema with the output of "podlace-node schema".
func TestSchema(t *testing.T) {
	const published = "../../../conf/schema/podlace-node.schema.json"
	var printed bytes.Buffer
	if status := Main([]string{"schema"}, &printed, os.Stderr); status != 0 {
		t.Fatal(status)
	}
	file, err := os.ReadFile(published)
	if err != nil {
		t.Fatal(err)
	}
	if string(file) != printed.String() {
		t.Errorf("conf/schema/podlace-node.schema.json differs from the keys of the agent; run: %s",
			"go run ./plugins/podlace-node schema >conf/schema/podlace-node.schema.json")
	}
}

// TestSchemaKeys: the schema and the error for an unknown key have exactly the keys that the agent reads.
func TestSchemaKeys(t *testing.T) {
	s := configSchema()
	for _, c := range []struct {
		text   string
		schema plugin.Schema
	}{{`{"?????????????": 1}`, s}, {`{"vxlan": {"?????????????": 1}}`, s["properties"].(plugin.Schema)["vxlan"].(plugin.Schema)}} {
		_, err := parseConfig("f", []byte(c.text))
		_, known, found := strings.Cut(err.Error(), "known keys: ")
		if !found {
			t.Fatal(err)
		}
		if diff := cmp.Diff(strings.Split(known, ", "), slices.Sorted(maps.Keys(c.schema["properties"].(plugin.Schema)))); diff != "" {
			t.Errorf("configSchema in pkg/agent/nodeagent and the keys that the agent decodes differ: add or remove the key there\n(-decoded +schema)\n%s", diff)
		}
	}
}

// TestSchemaAgrees: schema and agent accept or refuse the same configurations.
func TestSchemaAgrees(t *testing.T) {
	var printed bytes.Buffer
	Main([]string{"schema"}, &printed, os.Stderr)
	document, err := jsonschema.UnmarshalJSON(&printed)
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("config.json", document); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("config.json")
	if err != nil {
		t.Fatal(err)
	}
	for text, fine := range map[string]bool{
		`{}`:                                  true,
		`{"offLink": "vxlan"}`:                true,
		`{"offLink": "vxlna"}`:                false,
		`{"offLnk": "vxlan"}`:                 false,
		`{"clusterCIDRs": ["10.244.0.0/16"]}`: true,
		`{"clusterCIDRs": "10.244.0.0/16"}`:   false,
		`{"addressCIDRs": [1]}`:               false,
		`{"mtu": 0}`:                          true,
		`{"mtu": 575}`:                        false,
		`{"mtu": 576}`:                        true,
		`{"mtu": 65536}`:                      false,
		`{"mtu": "1500"}`:                     false,
		`{"vxlan": {"vni": 16777215}}`:        true,
		`{"vxlan": {"vni": 16777216}}`:        false,
		`{"vxlan": {"vni": 0}}`:               false,
		`{"vxlan": {"port": 65536}}`:          false,
		`{"vxlan": {"ports": 1}}`:             false,
		`{"binDir": "", "confDir": "/etc"}`:   true,
		`{"binDir": "opt"}`:                   false,
		`{"confDir": "etc"}`:                  false,
		`{"takeOver": true}`:                  true,
		`{"takeOver": "true"}`:                false,
		`{"adopt": ["boot", "17"]}`:           true,
		`{"adopt": [17]}`:                     false,
		`{"adopt": ["zebra"]}`:                false,
		`{"apiServer": "https://a:6443"}`:     true,
		`{"apiServer": ""}`:                   true,
		`{"apiServer": "a:6443"}`:             false,
	} {
		value, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(value); (err == nil) != fine {
			t.Errorf("the schema: %s: %v", text, err)
		}
		if _, err := parseConfig("f", []byte(text)); (err == nil) != fine {
			t.Errorf("the agent: %s: %v", text, err)
		}
	}
}
