// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// publishedSchema is the committed output of 'podlace schema'.
const publishedSchema = "../../conf/schema/conflist.schema.json"

// TestSchema: the published schema is that of the Go types. It accepts the shipped configurations, and rejects mistakes that an editor
// should highlight.
func TestSchema(t *testing.T) {
	_, printed, _ := run("schema")
	file, err := os.ReadFile(publishedSchema)
	if err != nil {
		t.Fatal(err)
	}
	if string(file) != printed {
		t.Fatalf("conf/schema/conflist.schema.json differs from the keys and the READMEs of the plugins; run: %s",
			"go run ./plugins/podlace schema >conf/schema/conflist.schema.json")
	}
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(printed))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("conflist.json", document); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("conflist.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(text []byte) error {
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			return err
		}
		return schema.Validate(value)
	}
	shipped, _ := filepath.Glob("../../conf/*.conflist")
	if len(shipped) < 5 {
		t.Fatal(shipped)
	}
	for _, name := range shipped {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := validate(text); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for plugin, place := range map[string]string{
		`{"type": "bridge", "isGatway": true}`:                                     "isGatway",
		`{"type": "podlace-bridge", "isGateway": "yes"}`:                           "isGateway",
		`{"type": "bridge", "ipam": {"type": "host-local", "range": []}}`:          "range",
		`{"type": "bridge", "ipMasq": {"nonMasqueradeCIDR": []}}`:                  "nonMasqueradeCIDR",
		`{"type": "portmap", "capabilities": {"portMappings": "true"}}`:            "portMappings",
		`{"type": "sriov", "resource": ["a"]}`:                                     "resource",
		`{"type": "portmap", "logLevel": "loud"}`:                                  "logLevel",
		`{"type": "portmap", "logFile": "x.log"}`:                                  "logFile",
		`{"type": "portmap", "logFile": "journal", "logLevel": "debug"}`:           "",
		`{"bridge": "cni0"}`:                                                       "type",
		`{"type": "bandwidth", "ingressRate": 1000, "ingressBurts": 1000}`:         "ingressBurts",
		`{"type": "bridge", "ipMasq": true, "mtu": "auto", "ipam": {"type": "x"}}`: "",
		`{"type": "tuning", "sysctl": {"a": "b"}}`:                                 "",
	} {
		err := validate([]byte(`{"cniVersion": "1.0.0", "name": "n", "plugins": [` + plugin + `]}`))
		if place == "" && err != nil || place != "" && (err == nil || !strings.Contains(err.Error(), place)) {
			t.Errorf("%s: %v", plugin, err)
		}
	}
	var parsed struct {
		Defs map[string]struct {
			Properties map[string]struct{ Description string }
		} `json:"$defs"`
	}
	if err := json.Unmarshal([]byte(printed), &parsed); err != nil || parsed.Defs["bridge"].Properties["isGateway"].Description == "" {
		t.Errorf("isGateway is not described: %v", err)
	}
	if !strings.Contains(parsed.Defs["bandwidth"].Properties["logFile"].Description, "journal for journald") {
		t.Errorf("logFile is not described: %q", parsed.Defs["bandwidth"].Properties["logFile"].Description)
	}
}
