// SPDX-License-Identifier: Apache-2.0

package rollback

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// configuration is a network's configuration, plugin by plugin.
type configuration []json.RawMessage

// findConfiguration reads the first file in the order of names, as runtimes do, that configures a network. A file that cannot be read
// matters only when no other is the network's. None is no error: what needs one fails.
func findConfiguration(dir, network string) (configuration, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var damaged []error
	for _, e := range entries {
		if !slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(e.Name())) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		var conf struct {
			Name    string
			Plugins configuration
		}
		if err := json.Unmarshal(data, &conf); err != nil {
			damaged = append(damaged, fmt.Errorf("%s: %w", filepath.Join(dir, e.Name()), err))
			continue
		}
		if conf.Name == network && conf.Plugins == nil {
			return configuration{data}, nil
		}
		if conf.Name == network {
			return conf.Plugins, nil
		}
	}
	return nil, errors.Join(damaged...)
}

// plugin returns the configuration of one plugin, nil when it has none.
func (c configuration) plugin(name string) json.RawMessage {
	for _, p := range c {
		var conf struct{ Type string }
		if json.Unmarshal(p, &conf) == nil && conf.Type == name {
			return p
		}
	}
	return nil
}

// dataDir returns the folder of the leases, "" for the default.
func (c configuration) dataDir() string {
	for _, p := range c {
		var conf struct{ IPAM struct{ DataDir string } }
		if json.Unmarshal(p, &conf) == nil && conf.IPAM.DataDir != "" {
			return conf.IPAM.DataDir
		}
	}
	return ""
}
