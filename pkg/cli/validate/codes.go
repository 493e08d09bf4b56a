// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"strconv"

	"github.com/podlace/podlace/pkg/plugin"
)

// Codes of problems. Those of the plugins' findings are in package plugin, and for an error of a plugin it is the number of the CNI error.
const (
	emptyFile         plugin.FindingCode = "empty-file"
	syntax            plugin.FindingCode = "syntax"
	unknownFile       plugin.FindingCode = "unknown-file"
	otherChecker      plugin.FindingCode = "other-checker"
	wrongType         plugin.FindingCode = "wrong-type"
	networkName       plugin.FindingCode = "network-name"
	networkNameTaken  plugin.FindingCode = "network-name-taken"
	cniVersion        plugin.FindingCode = "cni-version"
	noPlugin          plugin.FindingCode = "no-plugin"
	pluginTwice       plugin.FindingCode = "plugin-twice"
	bridgeDiffers     plugin.FindingCode = "bridge-differs"
	rangeEdge         plugin.FindingCode = "range-edge"
	gatewayOutside    plugin.FindingCode = "gateway-outside"
	macDropped        plugin.FindingCode = "mac-dropped"
	ownHostPort       plugin.FindingCode = "own-host-port"
	podNetwork        plugin.FindingCode = "pod-network"
	misspeltPlugin    plugin.FindingCode = "misspelt-plugin"
	devicePool        plugin.FindingCode = "device-pool"
	devicePoolEffect  plugin.FindingCode = "device-pool-effect"
	nodeFile          plugin.FindingCode = "node-file"
	unknownAnnotation plugin.FindingCode = "unknown-annotation"
	limitRate         plugin.FindingCode = "limit-rate"
	limitHostNetwork  plugin.FindingCode = "limit-host-network"
	hostPort          plugin.FindingCode = "host-port"
	hostPortTaken     plugin.FindingCode = "host-port-taken"
	noSpec            plugin.FindingCode = "no-spec"
)

// codeOf returns the number of the CNI error that a plugin returned.
func codeOf(err error) plugin.FindingCode {
	return plugin.FindingCode(strconv.FormatUint(uint64(plugin.Code(err)), 10))
}
