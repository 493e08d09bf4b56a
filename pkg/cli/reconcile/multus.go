// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
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

// MultusNetwork reports whether a configuration is of Multus, as a plugin or as the first of a list, and whether the default network of its
// pods is Podlace's network in the named file, or any with a plugin whose type has Podlace's prefix. Without any name, Multus' daemon has
// it.
func MultusNetwork(config []byte, network, file string) (isMultus, isOurs bool) {
	var list struct {
		multusConfig
		Plugins []multusConfig
	}
	if json.Unmarshal(config, &list) != nil {
		return false, false
	}
	m := append(list.Plugins, list.multusConfig)[0]
	stem := func(path string) string { return strings.TrimSuffix(filepath.Base(path), filepath.Ext(path)) }
	isOurs = m.ClusterNetwork == "" && len(m.Delegates) == 0 || filepath.Base(m.ClusterNetwork) == network ||
		stem(m.ClusterNetwork) == stem(file) // Multus finds a file without its ending, too
	for _, d := range m.Delegates {
		main := append(d.Plugins, struct{ Type string }{d.Type})[0].Type
		isOurs = isOurs || d.Name == network || strings.HasPrefix(main, plugin.ClusterPrefix)
	}
	return slices.Contains([]string{"multus", "multus-shim"}, m.Type), isOurs
}
