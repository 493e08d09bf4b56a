// SPDX-License-Identifier: Apache-2.0

package portmap

import "github.com/podlace/podlace/pkg/plugin"

// Findings returns a description of each setting that is valid but does not have the effect that its name suggests. The function does no
// I/O.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), unloggedFindings(config)...)
}

// unloggedFindings returns the findings that Parse does not log itself.
func unloggedFindings(config []byte) []plugin.Finding {
	return plugin.Capabilities(config, "portMappings", "no hostPort is forwarded")
}
