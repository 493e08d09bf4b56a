// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// TestExplain: 'podlace explain' finds each plugin's keys and the error codes, and suggests the most similar name for an unknown one.
func TestExplain(t *testing.T) {
	for name, want := range map[string]string{
		"isGateway":                   "bridge isGateway\n  default:\n    false\n  meaning:\n",
		"podlace-bridge.isgateway":    "bridge isGateway",
		"host-local.ranges":           "host-local ",
		"bandwidth.ingressRate":       "bandwidth ",
		"portmap.backend":             "portmap backend",
		"logFile":                     "plugin logFile",
		"podlace-pod.portmap":         "podlace-pod portmap",
		"podlace-pod.portmap.backend": "portmap backend",
		"sriov.resources":             "sriov resources",
		"resourceName":                "sriov-device-plugin resourceName",
		"podlace-node.offLink":        "podlace-node ",
		"maxTxRate":                   "sriov-device-plugin maxTxRate\n  key of the conflist:\n    max_tx_rate\n",
		"linkState":                   "sriov-device-plugin linkState\n  key of the conflist:\n    link_state\n",
		"VFConfig":                    "sriov-device-plugin kind, VFConfig\n",
		"dra.taints":                  "sriov-device-plugin dra, dra.taints\n",
		"cniVersion":                  "plugin cniVersion",
		"podCIDRs":                    "bridge podCIDRs",
		"resourceList":                "sriov-device-plugin resourceList",
		"104":                         "code 104",
		"11":                          "code 11",
	} {
		status, stdout, stderr := run("explain", name)
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
	if _, stdout, _ := run("explain"); strings.Count(stdout, "\n") < 100 || !strings.Contains(stdout, "bridge.antiSpoof\n") {
		t.Errorf("the list has %d lines", strings.Count(stdout, "\n"))
	}
}
