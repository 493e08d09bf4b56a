// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// ClusterPrefix is the prefix of the plugins' names in a cluster. Distributions and other network plugins overwrite files such as bridge
// and portmap at each update.
const ClusterPrefix = "podlace-"

// Kind returns the plugin for a "type" in a configuration: bridge for podlace-bridge.
func Kind(name string) string { return strings.TrimPrefix(name, ClusterPrefix) }
