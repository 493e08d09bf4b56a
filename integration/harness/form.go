// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"maps"
	"os"
	"slices"

	"github.com/podlace/podlace/pkg/plugin"
)

func formPod() bool { return os.Getenv("PODLACE_FORM") == plugin.PodType }

// ChainPlugins returns the plugins of ChainOf in the form in which the scenarios run.
func ChainPlugins() []string {
	if formPod() {
		return []string{plugin.PodType}
	}
	return []string{"bridge", "portmap", "bandwidth"}
}

// inForm returns a conflist in the form in which the scenarios run: with PODLACE_FORM=podlace-pod, that of AsPod.
func inForm(conflist []byte) []byte {
	if formPod() {
		return AsPod(conflist)
	}
	return conflist
}

// AsPod returns a conflist in which podlace-pod replaces bridge, portmap and bandwidth. One that does not begin with bridge stays.
func AsPod(conflist []byte) []byte {
	whole, list := Object{}, struct{ Plugins []Object }{}
	if json.Unmarshal(conflist, &list) != nil || json.Unmarshal(conflist, &whole) != nil || len(list.Plugins) == 0 ||
		list.Plugins[0]["type"] != "bridge" {
		return conflist
	}
	pod, rest := list.Plugins[0], list.Plugins[1:]
	capabilities := map[string]any{}
	addCapabilities := func(entry Object) {
		own, _ := entry["capabilities"].(map[string]any)
		maps.Copy(capabilities, own)
		delete(entry, "capabilities")
	}
	addCapabilities(pod)
	for _, kind := range []string{"portmap", "bandwidth"} {
		if len(rest) == 0 || rest[0]["type"] != kind {
			continue
		}
		section := rest[0]
		addCapabilities(section)
		delete(section, "type")
		if slices.ContainsFunc(plugin.CommonKeys(), func(key string) bool { return section[key] != nil }) {
			return conflist
		}
		pod[kind], rest = section, rest[1:]
	}
	pod["type"], pod["capabilities"] = plugin.PodType, capabilities
	whole["plugins"] = append([]Object{pod}, rest...)
	return Encode(whole)
}
