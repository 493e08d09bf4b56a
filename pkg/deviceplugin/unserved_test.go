// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"strings"
	"testing"
)

// TestUnserved: an entry that is not supported keeps no other from being served; it is named in the log and by a metric, and refused by
// --strict.
func TestUnserved(t *testing.T) {
	const odd = `{"resourceName": "fpga", "deviceType": "accelerator"}, {"resourceName": "vdpa", "selectors": {"pfNames": ["ens0f0#0"], "vdpaType": "vhost"}}`
	l := newLab(t, twoPFs(t), `{"resourceList": [`+odd+`, {"resourceName": "one", "selectors": {"pfNames": ["ens0f0"]}}]}`)
	l.ids("example.com/one", vf01)
	l.logged("level=ERROR", "an entry of the configuration is not served",
		"config.json:1: resourceList[0].deviceType: unsupported: accelerator", "example.com/fpga")
	l.logged("level=ERROR", "an entry of the configuration is not served", "unsupported: vdpaType", "example.com/vdpa")
	l.await("/metrics", `podlace_sriov_config_unserved{resource="example.com/fpga"} 1`,
		`podlace_sriov_config_unserved{resource="example.com/vdpa"} 1`)
	l.await("/readyz", "ok")
	l.Strict = true
	if err := runDaemon(t.Context(), l.settings, nil, quiet()); err == nil ||
		!strings.Contains(err.Error(), "config.json:1: resourceList[0].deviceType: unsupported: accelerator") {
		t.Errorf("got %v", err)
	}
}

// TestNothingHere: a daemon without a resource for its node says at its start what that means for the pods.
func TestNothingHere(t *testing.T) {
	l := newLab(t, twoPFs(t), `{"resourceList": [{"resourceName": "one", "hosts": ["other-*"], "selectors": {"pfNames": ["ens0f0"]}}]}`)
	l.logged("level=WARN", "no resource is for this node",
		"until a device plugin registers with the kubelet, sriov refuses all pods with code 11: leave it out of this node's conflist")
	l.hup()
	l.await("/readyz", "ok")
	if n := strings.Count(l.log.String(), "no resource is for this node"); n != 1 {
		t.Errorf("logged %d times", n)
	}
}
