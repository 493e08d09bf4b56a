// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// chartValue describes a value of the chart, except the values that switch a component on or off.
type chartValue struct {
	name, initial, comment string
	schema                 map[string]any
}

func otherValues(config map[string]any) []chartValue {
	return []chartValue{
		{"config", "{}", `Keys of podlace-node's config.json. They override those of the components. See plugins/podlace-node/README.md.`,
			config},
		{"conflist", `""`, "Text of the conflist, by --set-file conflist=FILE. Empty: the shipped 10-podlace.conflist.", map[string]any{"type": "string"}},
		{"sriovConfig", "{}", "config.json of the SR-IOV device plugin, for the components sriov and dra. Empty: the shipped example. " +
			"The shipped conflist contains its resources. With dra, its DeviceClasses are not part of the chart: " +
			"podlace sriov classes --config-file config.json | kubectl apply -f -", map[string]any{"type": "object"}},
	}
}

const imageComment = "Image of Podlace that the nodes can pull: REGISTRY/NAME@sha256:DIGEST or REGISTRY/NAME:TAG."

// headComment returns the comment at the start of a file as one line, without the license.
func headComment(file string) (string, error) {
	data, err := os.ReadFile(file)
	var words []string
	for line := range strings.Lines(string(data)) {
		text, ok := strings.CutPrefix(line, "# ")
		if !ok {
			break
		}
		if !strings.HasPrefix(text, "SPDX-") {
			words = append(words, strings.TrimSpace(text))
		}
	}
	return strings.Join(words, " "), err
}

func values(image string, components []string, comments map[string]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\nimage: %q\n\n# Components, as in docs/CLUSTER.md.\n", imageComment, image)
	for _, c := range components {
		fmt.Fprintf(&b, "\n# %s\n%s: false\n", comments[c], c)
	}
	for _, v := range otherValues(nil) {
		fmt.Fprintf(&b, "\n# %s\n%s: %s\n", v.comment, v.name, v.initial)
	}
	return b.String()
}

// valuesSchema returns values.schema.json, in which `config` has the schema of podlace-node's configuration.
func valuesSchema(conf string, components []string, comments map[string]string) (string, error) {
	data, err := os.ReadFile(filepath.Join(conf, "..", "schema", "podlace-node.schema.json"))
	if err != nil {
		return "", err
	}
	var config map[string]any
	if err := json.Unmarshal(data, &config); err != nil {
		return "", err
	}
	properties := map[string]any{
		"global": map[string]any{"type": "object", "description": "Helm sets it in a chart that contains this chart."},
		"image":  map[string]any{"type": "string", "description": imageComment},
	}
	for _, c := range components {
		properties[c] = map[string]any{"type": "boolean", "description": comments[c]}
	}
	draft := config["$schema"]
	delete(config, "$schema")
	for _, v := range otherValues(config) {
		v.schema["description"] = v.comment
		properties[v.name] = v.schema
	}
	text, err := json.MarshalIndent(map[string]any{"$schema": draft, "title": "Values of the chart podlace", "type": "object",
		"properties": properties, "additionalProperties": false}, "", "  ")
	return string(text) + "\n", err
}
