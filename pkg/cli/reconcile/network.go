// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// maxConfiguration is the size limit for files with network configurations. Real network configurations are much smaller than this limit.
const maxConfiguration = 1 << 20

// gcVersion is the oldest cniVersion in which GC exists. Podlace's plugins support GC even if the conflist has an older version.
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

// Networks reads all configurations in a folder, sorted by file name. If two configurations have the same network name, Networks uses the
// first configuration, as runtimes do. The second result of Networks describes the files that cannot be read.
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

// Named returns the network with the given name. Without such a network, it returns one that has only this name, and false.
func Named(networks []Network, name string) (Network, bool) {
	for _, n := range networks {
		if n.Name == name {
			return n, true
		}
	}
	return Network{Name: name}, false
}

func readNetwork(path string) (n Network, err error) {
	var raw struct {
		CNIVersion string            `json:"cniVersion"`
		Name       string            `json:"name"`
		Type       string            `json:"type"`
		DisableGC  bool              `json:"disableGC"`
		Inlined    bool              `json:"loadOnlyInlinedPlugins"`
		Plugins    []json.RawMessage `json:"plugins"`
	}
	data, err := store.ReadSmall(path, maxConfiguration, 0)
	if err != nil {
		return n, err
	}
	err = json.Unmarshal(data, &raw)
	switch {
	case err != nil:
		return n, fmt.Errorf("%s: %w", path, err)
	case raw.Name == "":
		return n, fmt.Errorf("%s: it has no name", path)
	case raw.Type != "":
		raw.Plugins = []json.RawMessage{data}
	case !raw.Inlined: // SPEC.md 1.1: a folder with the network's name holds further plugins
		more, err := inFolder(filepath.Join(filepath.Dir(path), raw.Name))
		if err != nil {
			return n, fmt.Errorf("%s: %w", path, err)
		}
		raw.Plugins = append(raw.Plugins, more...)
	}
	n = Network{Name: raw.Name, File: path, CNIVersion: raw.CNIVersion, DisableGC: raw.DisableGC, Text: data}
	for i, data := range raw.Plugins {
		var p struct {
			Type string `json:"type"`
			IPAM struct {
				Type    string          `json:"type"`
				DataDir json.RawMessage `json:"dataDir"` // any IPAM plugin may give the key a type of its own
			} `json:"ipam"`
		}
		if err := json.Unmarshal(data, &p); err != nil || p.Type == "" || p.Type != filepath.Base(p.Type) {
			return n, fmt.Errorf("%s: plugins[%d]: it has no usable type", path, i)
		}
		entry := Plugin{Type: p.Type, IPAM: p.IPAM.Type, raw: data}
		_ = json.Unmarshal(p.IPAM.DataDir, &entry.dataDir)
		n.Plugins = append(n.Plugins, entry)
	}
	if len(n.Plugins) == 0 {
		return n, fmt.Errorf("%s: no plugins", path)
	}
	return n, nil
}

func inFolder(dir string) (plugins []json.RawMessage, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".conf" || e.IsDir() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		data, bad := store.ReadSmall(path, maxConfiguration, 0)
		if bad == nil && !json.Valid(data) {
			bad = fmt.Errorf("%s: it is no JSON", path)
		}
		plugins, err = append(plugins, data), errors.Join(err, bad)
	}
	return plugins, err
}

// Plugin returns the configuration of the network's first plugin of the given kind (plugin.Kind), as its own entry or as a part of
// podlace-pod. If the network has no plugin of this kind, Plugin returns nil.
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

// Config returns the unchanged text of the plugin's configuration from the file.
func (p Plugin) Config() []byte { return p.raw }

// DataDir returns the folder in which the network's IPAM plugin stores leases. For the default folder, DataDir returns "".
func (n Network) DataDir() string {
	for _, p := range n.Plugins {
		if p.dataDir != "" {
			return p.dataDir
		}
	}
	return ""
}

// gcVersion returns the cniVersion with which GC of the network is called.
func (n Network) gcVersion() string {
	if ok, err := version.GreaterThanOrEqualTo(n.CNIVersion, gcVersion); ok && err == nil {
		return n.CNIVersion
	}
	return gcVersion
}
