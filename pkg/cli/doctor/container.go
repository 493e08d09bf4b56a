// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/nft"
)

// Unseen is the text of a skipped check that would examine the container and not the node.
const Unseen = "this container lacks the node's files, processes or rights"

// The first processes of containers, with at most 15 bytes of their names.
const (
	Agent        = "podlace-node"
	DevicePlugin = "sriov-device-pl"
)

// InContainer reports whether this process runs in a container whose first process is one of the daemons. Such a container has few of the
// node's files and none of its processes.
func InContainer(o Options, daemons ...string) bool {
	first, err := os.ReadFile((&node{Options: o}).path("proc/1/comm"))
	return err == nil && slices.Contains(daemons, strings.TrimSpace(string(first)))
}

// seen reports whether a check can examine the node.
func (n *node) seen(check string) bool {
	if !InContainer(n.Options, Agent, DevicePlugin) {
		return true
	}
	nodesOwn := []string{"kernel-features", "runtime", "status", "pods", "forward-policy", "firewall-reload", "networkmanager",
		"networkd", "router-advertisements", "disk", "kubelet"}
	withNetAdmin := []string{"ports", "rules", "iptables-variants"}
	_, err := nft.IPTables()
	return !slices.Contains(nodesOwn, check) && (!errors.Is(err, fs.ErrPermission) || !slices.Contains(withNetAdmin, check))
}
