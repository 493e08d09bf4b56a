// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns the settings that are valid but do not have the effect that they suggest. It does no I/O.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), traps(config)...)
}

// traps returns the findings that Parse does not log. Limits in the configuration need no capability.
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
