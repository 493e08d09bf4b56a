// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

// TestPublishedText checks that an attribute's text has its domain, and that a taint's is as kubectl shows it.
func TestPublishedText(t *testing.T) {
	got := publishedText(resourceapi.Device{Name: "0000-11-02-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"pf": text("ens0f0"), "resource.kubernetes.io/numaNode": number(1), "rdma": {BoolValue: new(false)}},
		Taints: []resourceapi.DeviceTaint{{Key: "a/link-down", Value: "ens0f0", Effect: "NoSchedule"}, {Key: "a/gone", Effect: "NoExecute"}}})
	want := poddevices.Published{Device: "0000-11-02-0", Attributes: map[string]string{"sriov.podlace.io/pf": "ens0f0",
		"resource.kubernetes.io/numaNode": "1", "sriov.podlace.io/rdma": "false"},
		Taints: []string{"a/link-down=ens0f0:NoSchedule", "a/gone:NoExecute"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestPublishedByAddress checks that Published returns each device under its PCI address.
func TestPublishedByAddress(t *testing.T) {
	claims := t.TempDir()
	d := New(Options{Node: "node-1", Claims: claims, Records: claim.NewCache(claims, ""), Log: slog.New(slog.DiscardHandler)})
	pf, _ := pci.ParseAddress("0000:11:00.0")
	vf, _ := pci.ParseAddress("0000:11:02.0")
	s := &pci.Snapshot{Devices: []pci.Device{{Address: pf, VFIndex: pci.Unknown, Interfaces: []string{"ens0f0"}}, {Address: vf, PF: pf}}}
	resource := &pool.Resource{Prefix: "example.com", Name: "fast", API: pool.DRA}
	d.Update(Inventory{Snapshot: s, Pools: []pool.Pool{{Name: "example.com/fast", Resource: resource,
		Devices: []pool.Device{{Device: s.Devices[1]}}}},
		Faults: map[string]Fault{vf.String(): {Kind: LinkDown}}, Taints: pool.Taints{LinkDown: "NoSchedule"}})
	got := d.Published()[vf.String()]
	if got.Pool != "node-1" || got.Device != "0000-11-02-0" || got.Attributes["sriov.podlace.io/pf"] != "ens0f0" ||
		!cmp.Equal(got.Taints, []string{"sriov.podlace.io/link-down=ens0f0:NoSchedule"}) || len(d.Published()) != 1 {
		t.Errorf("got %+v", d.Published())
	}
}
