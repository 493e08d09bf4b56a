// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"strconv"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/reconcile"
)

// These are the codes of findings whose check can find several problems. The code of an error in a configuration comes from package
// validate. The code of an error of STATUS is the number of the CNI error. The code of any other finding is the name of its check.
const (
	unreadable        plugin.FindingCode = "unreadable"
	noRuntime         plugin.FindingCode = "no-runtime"
	twoRuntimes       plugin.FindingCode = "two-runtimes"
	runtimeConfDir    plugin.FindingCode = "runtime-conf-dir"
	runtimeBinDir     plugin.FindingCode = "runtime-bin-dir"
	pluginHidden      plugin.FindingCode = "plugin-hidden"
	noConfDir         plugin.FindingCode = "no-conf-dir"
	unusableFile      plugin.FindingCode = "unusable-file"
	noNetworkOfOurs   plugin.FindingCode = "no-network"
	otherNetwork      plugin.FindingCode = "other-network"
	defaultNetwork    plugin.FindingCode = "default-network"
	writableFile      plugin.FindingCode = "writable-file"
	pluginMissing     plugin.FindingCode = "plugin-missing"
	pluginForeign     plugin.FindingCode = "plugin-foreign"
	pluginBroken      plugin.FindingCode = "plugin-broken"
	pluginVersions    plugin.FindingCode = "plugin-versions"
	addressesUnusable plugin.FindingCode = "addresses-unusable"
	addressesFew      plugin.FindingCode = "addresses-few"
	addressesNone     plugin.FindingCode = "addresses-none"
	deadAttachments   plugin.FindingCode = "dead-attachments"
	damagedRecord     plugin.FindingCode = "damaged-record"
	portDetached      plugin.FindingCode = "port-detached"
	portMoved         plugin.FindingCode = "port-moved"
	portUnrecorded    plugin.FindingCode = "port-unrecorded"
	bridgeMissing     plugin.FindingCode = "bridge-missing"
	checkFailed       plugin.FindingCode = "check-failed"
	subnetChanged     plugin.FindingCode = "subnet-changed"
	rulesMissing      plugin.FindingCode = "rules-missing"
	limitsMissing     plugin.FindingCode = "limits-missing"
	agentStopped      plugin.FindingCode = "agent-stopped"
	agentProblem      plugin.FindingCode = "agent-problem"
	ufwForward        plugin.FindingCode = "ufw-forward"
	firewalldZone     plugin.FindingCode = "firewalld-zone"
	kubeletSocket     plugin.FindingCode = "kubelet-socket"
	kubeletGate       plugin.FindingCode = "kubelet-gate"
)

// answered() returns the number of the CNI error that a plugin returned, or "" if the plugin returned no CNI error.
func answered(err error) plugin.FindingCode {
	var refusal reconcile.Refusal
	if errors.As(err, &refusal) {
		return plugin.FindingCode(strconv.FormatUint(uint64(refusal.Code), 10))
	}
	return ""
}
