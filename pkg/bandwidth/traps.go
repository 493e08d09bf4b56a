// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/plugin"
)

// Findings returns a list of valid but misleading settings. A setting is in this list if it has no effect, or if its name suggests another
// effect. Findings does no I/O.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), unloggedFindings(config)...)
}

// unloggedFindings returns findings about the capability "bandwidth", which Parse does not check. A configuration that contains limits does
// not need this capability.
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
