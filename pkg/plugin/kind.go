// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// ClusterPrefix begins the file names of Podlace's plugins in a cluster, where a package update or another network plugin would otherwise
// overwrite files such as bridge and portmap.
const ClusterPrefix = "podlace-"

// Kinds returns the names of Podlace's plugins without ClusterPrefix.
func Kinds() []string {
	return []string{"bridge", "host-local", "loopback", "portmap", "bandwidth", "sriov", PodType}
}

// TypesOf returns the types that name a plugin in a conflist: with and without ClusterPrefix, which PodType has already.
func TypesOf(kind string) []string {
	if kind == PodType {
		return []string{PodType}
	}
	return []string{kind, ClusterPrefix + kind}
}

// Kind returns the name of a plugin without ClusterPrefix: "bridge" for the type "podlace-bridge".
func Kind(name string) string {
	kind := strings.TrimPrefix(name, ClusterPrefix)
	if name == PodType || kind == PodType { // PodType takes no second prefix
		return name
	}
	return kind
}
