// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"encoding/json"
	"strings"
	"testing"

	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

// TestMetadata: a container waits until the metadata file of its claim has the MAC of its VF, which is there after ADD, and finds the
// VF's PCI address and interface in it.
func TestMetadata(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	file := metadata.ResourceClaimFilePath(driverName, "vf", "nic")
	l.create(`
kind: Pod
metadata: {name: web}
spec:
  resourceClaims: [{name: nic, resourceClaimName: vf}]
  containers:
  - resources: {claims: [{name: nic}]}
    command: [/bin/sh, -c, 'until grep -q hardwareAddress ` + file + `; do sleep 1; done; cat ` + file + `; ` + said + `']`)
	l.runs("web")
	text := l.logs("web")["app"]
	var m metadata.DeviceMetadata
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(strings.NewReader(text)), &m); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	t.Log(strings.TrimSpace(text))
	id := l.allocated("vf")[0]
	if len(m.Requests) != 1 || len(m.Requests[0].Devices) != 1 {
		t.Fatal(text)
	}
	d := m.Requests[0].Devices[0]
	if *d.Attributes["resource.kubernetes.io/pciBusID"].StringValue != id || d.NetworkData.InterfaceName != "net1" ||
		d.NetworkData.HardwareAddress != l.before[id].MAC {
		t.Errorf("VF %s: %s", id, text)
	}
}
