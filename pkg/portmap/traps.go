// SPDX-License-Identifier: Apache-2.0

package portmap

import "github.com/podlace/podlace/pkg/plugin"

// Findings returns settings that are valid but do not do what their names suggest. It does no I/O.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), unloggedFindings(config)...)
}

// unloggedFindings returns the findings that Parse does not log.
func unloggedFindings(config []byte) []plugin.Finding {
	return plugin.Capabilities(config, "portMappings", "no hostPort is forwarded")
}
