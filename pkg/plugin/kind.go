// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// ClusterPrefix is the prefix of the file names of Podlace's plugins in a cluster. Without ClusterPrefix, a package update or another
// network plugin would overwrite files such as bridge and portmap.
const ClusterPrefix = "podlace-"

// Kinds returns the names of Podlace's plugins without ClusterPrefix.
func Kinds() []string {
	return []string{"bridge", "host-local", "loopback", "portmap", "bandwidth", "sriov", PodType}
}

// Kind returns the name of a plugin without ClusterPrefix: "bridge" for the type "podlace-bridge". PodType is its own kind.
func Kind(name string) string {
	if name == PodType {
		return name
	}
	return strings.TrimPrefix(name, ClusterPrefix)
}
