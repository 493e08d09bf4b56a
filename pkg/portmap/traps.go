// SPDX-License-Identifier: Apache-2.0

package portmap

import "github.com/podlace/podlace/pkg/plugin"

// Findings returns the parts of a configuration that are legal and do not do what they seem to do. Pure.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), traps(config)...)
}

// traps are the findings that Parse does not log.
func traps(config []byte) []plugin.Finding {
	return plugin.Capabilities(config, "portMappings", "no hostPort is forwarded")
}
