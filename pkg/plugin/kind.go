// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// ClusterPrefix begins the names under which a cluster installs the plugins. Distributions and other network plugins overwrite files such
// as bridge and portmap at each update.
const ClusterPrefix = "podlace-"

// Kind returns which plugin a "type" of a configuration means: that of podlace-bridge is bridge.
func Kind(name string) string { return strings.TrimPrefix(name, ClusterPrefix) }
