// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"path/filepath"
	"slices"
)

// multusConfig holds the keys of Multus that name the default network of pods.
type multusConfig struct {
	Type           string
	ClusterNetwork string // the name of a network or of its file, or the file's path
	Delegates      []struct {
		Name, Type string
		Plugins    []struct{ Type string }
	}
}

// MultusNetwork returns the names, main plugins and file names by which a configuration of Multus, as a plugin or as the first of a list,
// names the default network of pods. ok is false for other plugins. The thick plugin's file may leave the network to its daemon.
func MultusNetwork(config []byte) (names []string, ok bool) {
	var file struct {
		multusConfig
		Plugins []multusConfig
	}
	if json.Unmarshal(config, &file) != nil {
		return nil, false
	}
	m := append(file.Plugins, file.multusConfig)[0]
	if m.ClusterNetwork != "" {
		names = append(names, filepath.Base(m.ClusterNetwork))
	}
	for _, d := range m.Delegates {
		names = append(names, d.Name, append(d.Plugins, struct{ Type string }{d.Type})[0].Type)
	}
	return names, slices.Contains([]string{"multus", "multus-shim"}, m.Type)
}
