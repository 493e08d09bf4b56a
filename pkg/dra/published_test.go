// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/podlace/podlace/pkg/allocation"
)

// TestPublishedText: attributes have their domain, taints are written as kubectl writes them.
func TestPublishedText(t *testing.T) {
	got := published(resourceapi.Device{Name: "0000-11-02-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"pf": text("ens0f0"), "resource.kubernetes.io/numaNode": number(1), "rdma": {BoolValue: new(false)}},
		Taints: []resourceapi.DeviceTaint{{Key: "a/link-down", Value: "ens0f0", Effect: "NoSchedule"}, {Key: "a/gone", Effect: "NoExecute"}}})
	want := allocation.Published{Device: "0000-11-02-0", Attributes: map[string]string{"sriov.podlace.io/pf": "ens0f0",
		"resource.kubernetes.io/numaNode": "1", "sriov.podlace.io/rdma": "false"},
		Taints: []string{"a/link-down=ens0f0:NoSchedule", "a/gone:NoExecute"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
