// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"strconv"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/plugin"
)

// The following constants are the codes of findings whose check can find several problems. Package validate defines the codes of
// configuration errors. If STATUS returns a CNI error, the code of the finding is the number of this error. The code of any other finding
// is the name of its check.
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
	sriovMissing      plugin.FindingCode = "sriov-missing"
)

// answered() returns the number of the CNI error in err, or "" if err contains no CNI error from a plugin.
func answered(err error) plugin.FindingCode {
	var refusal reconcile.Refusal
	if errors.As(err, &refusal) {
		return plugin.FindingCode(strconv.FormatUint(uint64(refusal.Code), 10))
	}
	return ""
}
