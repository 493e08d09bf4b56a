// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns the parts of a configuration that are legal and do not do what they seem to do. Pure.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), traps(config)...)
}

// traps are the findings that Parse does not log. Limits of the configuration need no capability.
func traps(config []byte) []plugin.Finding {
	var raw rawConfig
	if json.Unmarshal(config, &raw) != nil {
		return nil
	}
	if !raw.empty() {
		return plugin.Capabilities(config, "", "")
	}
	return plugin.Capabilities(config, "bandwidth", "no pod is limited")
}
