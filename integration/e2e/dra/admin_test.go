// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestAdminAccess: an administrator's claim lists the addresses of all VFs, allocated or free. No VF moves into its pod, and other pods
// still start and end.
func TestAdminAccess(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	ids := l.allocated("vf")
	l.create(`
kind: ResourceClaim
metadata: {name: watch}
spec: {devices: {requests: [{name: all, exactly: {deviceClassName: ` + l.class() + `, adminAccess: true, allocationMode: All}}]}}
---
kind: Pod
metadata: {name: admin}
spec:
  resourceClaims: [{name: all, resourceClaimName: watch}]
  containers: [{resources: {claims: [{name: all}]}}]
`)
	l.runs("admin")
	l.attached("admin")
	l.attached("web", ids...)
	got := strings.Split(l.variables("admin", "app")[variable], ",")
	if slices.Sort(got); !slices.Equal(got, l.ids) {
		t.Errorf("the administrator's container has the addresses %v, want %v", got, l.ids)
	}
	l.template("more", "nic")
	l.pod("late", "nic=+more") // the VF is free, although the administrator's claim contains it
	l.runs("late")
	l.attached("late", l.allocated(l.claimOf("late", "nic"))...)
	l.delete("web")
	l.delete("admin")
	l.attached("late", l.allocated(l.claimOf("late", "nic"))...)
}

// TestAdminAll33: the scheduler cannot allocate a claim for all devices of a node that has more than 32, but one for 32.
func TestAdminAll33(t *testing.T) {
	l := newLab(t, setup{machine: pcitest.Machine{Nodes: 1, PFs: 1, VFs: 33, InPods: true}})
	for name, mode := range map[string]string{"all": "allocationMode: All", "count": "count: 32"} {
		l.create(`
kind: ResourceClaim
metadata: {name: ` + name + `}
spec: {devices: {requests: [{name: all, exactly: {deviceClassName: ` + l.class() + `, adminAccess: true, ` + mode + `}}]}}
`)
		l.pod(name, "all="+name)
	}
	t.Logf("the scheduler says: %s", l.event("all", "32"))
	l.pending("all")
	l.runs("count")
	l.attached("count")
}

// TestPreScheduled: a pod that is bound before its claim is allocated waits on the node, without a VF, until the claim is reserved for it.
func TestPreScheduled(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.create("{kind: Pod, metadata: {name: web}, spec: {nodeName: " + nodeName + ", " + claimList([]string{"nic=vf"}) + "}}")
	l.pending("web")
	if err := errors.Join(l.noRecords(), l.allHome()); err != nil {
		t.Error(err)
	}
	l.allocate("vf", nodeName, deviceName(l.ids[5]))
	l.runs("web") // the claim controller reserves a claim for pods that have a node
	l.attached("web", l.ids[5])
}

// allocate writes an allocation into a claim for the request named "nic", as the scheduler does.
func (l *lab) allocate(claim, pool, device string) {
	l.Helper()
	c := l.getClaim(claim)
	results := []resourceapi.DeviceRequestAllocationResult{{Request: "nic", Driver: driverName, Pool: pool, Device: device}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	if _, err := l.client.ResourceV1().ResourceClaims(l.ns).UpdateStatus(context.Background(), c, metav1.UpdateOptions{}); err != nil {
		l.Fatal(err)
	}
}

// TestWrongNode: Prepare refuses a claim of another node and one for a device that does not exist. An event of the pod has the reason.
func TestWrongNode(t *testing.T) {
	l := newLab(t, setup{})
	for name, result := range map[string][2]string{"pool": {"node9", deviceName(l.ids[0])}, "device": {nodeName, "0000-99-00-1"}} {
		l.claim(name, "nic")
		l.allocate(name, result[0], result[1])
		l.create("{kind: Pod, metadata: {name: " + name + "}, spec: {nodeName: " + nodeName + ", " + claimList([]string{"nic=" + name}) + "}}")
		t.Logf("%s", l.event(name, fmt.Sprintf("%s/%s", l.ns, name), result[map[string]int{"pool": 0, "device": 1}[name]]))
	}
	if err := errors.Join(l.noRecords(), l.allHome()); err != nil {
		t.Error(err)
	}
}
