// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"strings"
	"testing"
)

// TestUnserved checks that an unsupported resource is in the log and a metric without affecting others. With --strict, the
// configuration is refused.
func TestUnserved(t *testing.T) {
	const odd = `{"resourceName": "fpga", "deviceType": "accelerator"}, {"resourceName": "vdpa", "selectors": {"pfNames": ["ens0f0#0"], "vdpaType": "vhost"}}`
	l := newLab(t, twoPFs(t), `{"resourceList": [`+odd+`, {"resourceName": "one", "selectors": {"pfNames": ["ens0f0"]}}]}`)
	l.awaitDevices("example.com/one", vf01)
	l.awaitLog("level=ERROR", "a configuration entry is not supported",
		"config.json:1:44: resourceList[0].deviceType: unsupported: accelerator", "example.com/fpga")
	l.awaitLog("level=ERROR", "a configuration entry is not supported", "unsupported: vdpaType", "example.com/vdpa")
	l.await("/metrics", `podlace_sriov_config_unserved{resource="example.com/fpga"} 1`,
		`podlace_sriov_config_unserved{resource="example.com/vdpa"} 1`)
	l.await("/readyz", "ok")
	l.Strict = true
	if err := runDaemon(t.Context(), l.daemonOptions, nil, quiet()); err == nil ||
		!strings.Contains(err.Error(), "config.json:1:44: resourceList[0].deviceType: unsupported: accelerator") {
		t.Errorf("got %v", err)
	}
}

// TestNothingHere checks that a configuration without a resource for the node causes a warning that describes the effect on pods.
func TestNothingHere(t *testing.T) {
	l := newLab(t, twoPFs(t), `{"resourceList": [{"resourceName": "one", "hosts": ["other-*"], "selectors": {"pfNames": ["ens0f0"]}}]}`)
	l.awaitLog("level=WARN", "the configuration has no resource for this node",
		"the sriov plugin refuses all pods with code 11 until a device plugin registers with the kubelet: remove sriov from this node's conflist")
	l.hup()
	l.await("/readyz", "ok")
	if n := strings.Count(l.log.String(), "the configuration has no resource for this node"); n != 1 {
		t.Errorf("logged %d times", n)
	}
}
