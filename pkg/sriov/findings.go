// SPDX-License-Identifier: Apache-2.0

package sriov

import "github.com/podlace/podlace/pkg/plugin"

// Findings returns the parts of a configuration that are legal and do not do what they seem to do. Pure.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), plugin.Capabilities(config, "", "")...)
}
