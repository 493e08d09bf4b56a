// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// ClusterPrefix is the prefix of the file names of Podlace's plugins in a cluster. Without the prefix, a package update or another network
// plugin would overwrite files such as bridge and portmap.
const ClusterPrefix = "podlace-"

// Kind returns the name of a plugin without ClusterPrefix. If the type in the configuration is "podlace-bridge", Kind returns "bridge".
func Kind(name string) string { return strings.TrimPrefix(name, ClusterPrefix) }
