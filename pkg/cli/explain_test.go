// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// TestExplain: 'podlace explain' finds each plugin's keys and the error codes, and suggests the most similar name for an unknown one.
func TestExplain(t *testing.T) {
	for name, want := range map[string]string{
		"isGateway":                   "key isGateway of bridge\n  default:\n    false\n  meaning:\n",
		"podlace-bridge.isgateway":    "key isGateway of bridge\n",
		"host-local.ranges":           " of host-local\n",
		"bridge isGateway":            "key isGateway of bridge\n",
		"bandwidth.ingressRate":       " of bandwidth\n",
		"portmap.backend":             "key backend of portmap\n",
		"logFile":                     "key logFile of all plugins\n",
		"podlace-pod.portmap":         "key portmap of podlace-pod\n",
		"podlace-pod.portmap.backend": "key backend of portmap\n",
		"sriov.resources":             "key resources of sriov\n",
		"resourceName":                "key resourceName of sriov-device-plugin\n",
		"podlace-node.offLink":        " of podlace-node\n",
		"maxTxRate":                   "key maxTxRate of sriov-device-plugin\n  key of the conflist:\n    max_tx_rate\n",
		"linkState":                   "key linkState of sriov-device-plugin\n  key of the conflist:\n    link_state\n",
		"VFConfig":                    "key kind, VFConfig of sriov-device-plugin\n",
		"dra.taints":                  "key dra, dra.taints of sriov-device-plugin\n",
		"cniVersion":                  "key cniVersion of all plugins\n",
		"podCIDRs":                    "key podCIDRs of bridge\n",
		"resourceList":                "key resourceList, cdi of sriov-device-plugin\n",
		"104":                         "code 104 of all plugins\n",
		"11":                          "code 11 of all plugins\n",
	} {
		status, stdout, stderr := run(append([]string{"explain"}, strings.Fields(name)...)...)
		if status != exitOK || !strings.Contains(stdout, want) || strings.Contains(stdout, "](") || strings.Contains(stdout, "`") {
			t.Errorf("%s: status %d, %q, %q, want %q", name, status, stdout, stderr, want)
		}
	}
	for name, want := range map[string]string{"isGatway": "did you mean isGateway?", "9999": `"9999": 'podlace explain' lists all`,
		"": `"": 'podlace explain' lists all`} {
		if status, stdout, stderr := run("explain", name); status != exitFailed || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %q, %q", name, status, stdout, stderr)
		}
	}
	_, stdout, _ := run("explain")
	for _, want := range []string{"codes of bridge:\n    6, 7, 50, ", "codes of all plugins:\n    1, 2, ",
		"keys of bridge:\n    bridge, isGateway, ",
		"checks of podlace doctor:\n    kernel-features, runtime, ", "codes of podlace validate:\n    empty-file, ", "keys of all plugins:\n    "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the list lacks %q:\n%s", want, stdout)
		}
	}
}
