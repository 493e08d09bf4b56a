// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"testing"
)

// TestPodGroup: a pod of the group for which a claim is reserved gets its VF, which returns to the node with the pod's end.
func TestPodGroup(t *testing.T) {
	needGate(t, "DRAWorkloadResourceClaims")
	l := newLab(t, setup{})
	l.template("vf", "nic")
	l.create("{apiVersion: scheduling.k8s.io/v1beta1, kind: PodGroup, metadata: {name: gang}, spec: {schedulingPolicy: {basic: {}}, " +
		claimList([]string{"nic=+vf"}) + "}}")
	l.create("{kind: Pod, metadata: {name: web}, spec: {schedulingGroup: {podGroupName: gang}, " + claimList([]string{"nic=+vf"}) + "}}")
	l.runs("web")
	claim := l.claimOf("web", "nic")
	reserved := l.getClaim(claim).Status.ReservedFor
	if len(reserved) != 1 || reserved[0].Resource != "podgroups" || reserved[0].Name != "gang" {
		t.Fatalf("the claim is reserved for %+v: want the PodGroup", reserved)
	}
	ids := l.allocated(claim)
	if len(ids) != 1 {
		t.Fatalf("the claim has %v", ids)
	}
	l.attached("web", ids...)
	l.delete("web")
	l.gone("web")
	within(t, "the VF is on the node again", l.allHome)
}
