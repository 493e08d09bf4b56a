// SPDX-License-Identifier: Apache-2.0

// Package nodefile reads and writes /run/podlace/node.json, which tells the plugins what differs from node to node: the node's podCIDRs, the
// CIDRs of all pods, and the MTU. podlace-node writes it, or an administrator. It is on tmpfs: after a boot no pod starts before it is
// written again.
package nodefile

import (
	"net/netip"

	"github.com/podlace/podlace/pkg/store"
)

// Path is the file.
const Path = store.Root + "/" + name

const name = "node.json"

// Node is the content of the file.
type Node struct {
	PodCIDRs []netip.Prefix `json:"podCIDRs"`
	// ClusterCIDRs are the CIDRs of the pods of all nodes, at most MaxClusterCIDRs: what the word useClusterCidr stands for.
	ClusterCIDRs []netip.Prefix `json:"clusterCIDRs,omitempty"`
	// MTU is that of the pods' interfaces, in bytes. 0: that of the uplink.
	MTU int `json:"mtu,omitempty"`
}

// MaxClusterCIDRs bounds ClusterCIDRs: older plugins refuse a file of more than 64 KiB.
const MaxClusterCIDRs = 256
