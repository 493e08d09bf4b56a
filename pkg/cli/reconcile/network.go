// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
	"github.com/podlace/podlace/pkg/strict"
)

// gcVersion is the oldest cniVersion with GC, which Podlace's plugins know even if the conflist has an older version.
const gcVersion = "1.1.0"

// Network is the configuration of a network, as a runtime loads it.
type Network struct {
	Name       string
	File       string
	CNIVersion string
	DisableGC  bool
	Plugins    []Plugin
	Text       []byte // content of the file
}

// Plugin is one plugin of a network.
type Plugin struct {
	Type string
	IPAM string // type of its IPAM plugin, or ""

	dataDir string // folder in which host-local stores leases; "" for the default folder
	raw     json.RawMessage
}

// Networks reads all configurations in a folder, sorted by file name. Of two with the same network name the first counts, as for runtimes.
// notes describe the files that cannot be read.
func Networks(dir string) (networks []Network, notes []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		if e.IsDir() || !slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(e.Name())) {
			continue
		}
		n, err := readNetwork(filepath.Join(dir, e.Name()))
		same, taken := Named(networks, n.Name)
		switch {
		case err != nil:
			notes = append(notes, err.Error())
		case taken:
			notes = append(notes, fmt.Sprintf("%s: network %s is in %s already", n.File, n.Name, same.File))
		default:
			networks = append(networks, n)
		}
	}
	return networks, notes, nil
}

// Named returns the network with the given name, or one that has only this name, and false.
func Named(networks []Network, name string) (Network, bool) {
	for _, n := range networks {
		if n.Name == name {
			return n, true
		}
	}
	return Network{Name: name}, false
}

func readNetwork(path string) (n Network, err error) {
	data, err := store.ReadFile(path)
	if err != nil {
		return n, err
	}
	list, err := Load(path, data)
	if err != nil {
		return n, fmt.Errorf("%s: %w", path, err)
	}
	n = Network{Name: list.Name, File: path, CNIVersion: list.CNIVersion, DisableGC: list.DisableGC, Text: data}
	for _, p := range list.Plugins {
		var keys struct {
			IPAM struct{ DataDir string }
		}
		_ = json.Unmarshal(p.Bytes, &keys) // any IPAM plugin may give dataDir a type of its own
		n.Plugins = append(n.Plugins, Plugin{Type: p.Network.Type, IPAM: p.Network.IPAM.Type, dataDir: keys.IPAM.DataDir, raw: p.Bytes})
	}
	return n, nil
}

// Load loads a configuration file as runtimes do. A .conf or .json is one plugin. Any other file is a list, to which a .conflist adds the
// files in the folder of the network's name.
func Load(path string, data []byte) (list *libcni.NetworkConfigList, err error) {
	if slices.Contains([]string{".conf", ".json"}, filepath.Ext(path)) {
		one, err := libcni.NetworkPluginConfFromBytes(data)
		if err != nil {
			return nil, err
		}
		plugins := []*libcni.PluginConfig{one}
		list = &libcni.NetworkConfigList{Name: one.Network.Name, CNIVersion: one.Network.CNIVersion, Plugins: plugins, Bytes: data}
	} else if list, err = libcni.NetworkConfFromBytes(data); err != nil {
		return nil, err
	}
	files, err := FolderFiles(path, list.Name, list.LoadOnlyInlinedPlugins)
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		data, err := store.ReadFile(file)
		if err != nil {
			return nil, err
		}
		p, err := libcni.NetworkPluginConfFromBytes(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		list.Plugins = append(list.Plugins, p)
	}
	for i, p := range list.Plugins {
		if p.Network.Type != filepath.Base(p.Network.Type) {
			return nil, plugin.KeyErrorf(fmt.Sprintf("plugins[%d].type", i), "type %q: want the name of a file in the runtime's folder of plugins",
				p.Network.Type)
		}
	}
	if list.Name == "" || len(list.Plugins) == 0 {
		return nil, errors.New(`it has no name, or no list of configurations under "plugins"`)
	}
	return list, nil
}

// FolderFiles returns the files, each a plugin, that runtimes add to the list in a .conflist: those in the folder of the network's name.
func FolderFiles(path, network string, onlyInlined bool) ([]string, error) {
	if filepath.Ext(path) != ".conflist" || onlyInlined {
		return nil, nil
	}
	return libcni.ConfFiles(filepath.Join(filepath.Dir(path), network), []string{".conf"})
}

// RefusedKeys returns a problem for each key of a list, except its name, version and plugins, that keeps runtimes from loading it.
func RefusedKeys(root strict.Value) (problems []strict.Problem) {
	for _, key := range []string{"cniVersions", "disableCheck", "disableGC", "loadOnlyInlinedPlugins"} {
		v := root.Get(key)
		list, _ := json.Marshal(map[string]any{"name": "a", "plugins": []types.PluginConf{{Type: "a"}}, key: v})
		if _, err := Load("", list); err != nil && v.Name != "" {
			want := map[bool]string{true: `versions such as ["1.1.0"]`, false: "true or false"}[key == "cniVersions"]
			problems = append(problems, strict.Problem{Place: v.Place, Text: fmt.Sprintf("%s: runtimes refuse the configuration: want %s", v, want)})
		}
	}
	return problems
}

// Plugin returns the configuration of the network's first plugin of a kind (plugin.Kind), as its own entry or as a part of podlace-pod, or
// nil.
func (n Network) Plugin(kind string) json.RawMessage {
	for _, p := range n.Plugins {
		for _, part := range plugin.Parts(p.raw) {
			if part.Kind == kind {
				return part.Config
			}
		}
	}
	return nil
}

// Main returns the kind of the plugin that makes the pod's interface.
func (n Network) Main() string { return plugin.Parts(n.Plugins[0].raw)[0].Kind }

// has reports whether the plugin is of a kind, contains it as a part, or uses it for IPAM.
func (p Plugin) has(kind string) bool {
	return plugin.Runs(p.Type, kind) || plugin.Kind(p.IPAM) == kind
}

// Config returns the plugin's configuration, as libcni encodes it.
func (p Plugin) Config() []byte { return p.raw }

// DataDir returns the folder of the network's leases, or "" for the default.
func (n Network) DataDir() string {
	for _, p := range n.Plugins {
		if p.dataDir != "" {
			return p.dataDir
		}
	}
	return ""
}

// gcVersion returns the cniVersion for GC of the network.
func (n Network) gcVersion() string {
	if ok, err := version.GreaterThanOrEqualTo(n.CNIVersion, gcVersion); ok && err == nil {
		return n.CNIVersion
	}
	return gcVersion
}
