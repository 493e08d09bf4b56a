// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns settings that are valid but have no effect, or another one than their name suggests. It does no I/O.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), unloggedFindings(config)...)
}

// unloggedFindings returns findings about the capability "bandwidth", which Parse does not check and a configuration with limits does not
// need.
func unloggedFindings(config []byte) []plugin.Finding {
	var raw rawConfig
	if json.Unmarshal(config, &raw) != nil {
		return nil
	}
	if !raw.empty() {
		return plugin.Capabilities(config, "", "")
	}
	return plugin.Capabilities(config, "bandwidth", "no pod is limited")
}
