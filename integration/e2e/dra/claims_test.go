// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestClaim: the pod for which a claim is reserved has its VF. When the claim's last pod ends, the claim is deallocated, the VF returns to
// the node, and another pod can use the claim.
func TestClaim(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	for _, pod := range []string{"first", "second"} {
		l.pod(pod, "nic=vf")
		l.runs(pod)
		ids := l.allocated("vf")
		if len(ids) != 1 {
			t.Fatalf("the claim has %v", ids)
		}
		l.attached(pod, ids...)
		l.delete(pod)
		within(t, "the claim is deallocated", func() error {
			if c := l.getClaim("vf"); c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
				return fmt.Errorf("%+v", c.Status)
			}
			return nil
		})
		within(t, "the VF is home", func() error { return errors.Join(l.noRecords(), l.allHome()) })
	}
	l.pod("none") // a pod without claims
	l.runs("none")
	l.attached("none")
}

// TestTemplate: each pod with a claim template has its own VF. The generated claim is deleted together with its pod.
func TestTemplate(t *testing.T) {
	l := newLab(t, setup{})
	l.template("vf", "nic")
	var all []string
	for i := range 4 {
		l.pod(fmt.Sprint("web-", i), "nic=+vf")
	}
	for i := range 4 {
		pod := fmt.Sprint("web-", i)
		l.runs(pod)
		ids := l.allocated(l.claimOf(pod, "nic"))
		l.attached(pod, ids...)
		all = append(all, ids...)
	}
	slices.Sort(all)
	if len(slices.Compact(all)) != 4 {
		t.Errorf("the pods have %v", all)
	}
	claim := l.claimOf("web-0", "nic")
	l.delete("web-0", "web-1", "web-2", "web-3")
	within(t, "the claim is gone", func() error {
		_, err := l.client.ResourceV1().ResourceClaims(l.ns).Get(context.Background(), claim, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New("it is there"))
	})
}

// TestTwoClaims: a pod has one interface for each VF, sorted by the claim's name in the pod and then by the request's. The order in the pod
// specification does not matter.
func TestTwoClaims(t *testing.T) {
	l := newLab(t, setup{})
	l.template("one", "nic")
	l.template("two", "west", "east")
	l.pod("web", "b=+one", "a=+two", "c=+one")
	l.runs("web")
	a, b, c := l.allocated(l.claimOf("web", "a")), l.allocated(l.claimOf("web", "b")), l.allocated(l.claimOf("web", "c"))
	l.attached("web", slices.Concat(a, b, c)...)
}

// TestContainersShare: two containers use a claim's VF through one interface of the pod. Each has its address in the environment.
func TestContainersShare(t *testing.T) {
	l := newLab(t, setup{})
	l.create(`
kind: ResourceClaim
metadata: {name: vf}
spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: ` + l.class() + `, count: 2}}]}}
---
kind: Pod
metadata: {name: web}
spec:
  resourceClaims: [{name: nic, resourceClaimName: vf}]
  containers:
  - {name: app, resources: {claims: [{name: nic}]}}
  - {name: sidecar, resources: {claims: [{name: nic, request: nic}]}}
  - {name: stranger}
`)
	l.runs("web")
	ids := l.allocated("vf")
	slices.Sort(ids)
	l.attached("web", ids...)
	for container, want := range map[string]string{"app": strings.Join(ids, ","), "sidecar": strings.Join(ids, ","), "stranger": ""} {
		if got := l.variables("web", container)[variable]; got != want {
			t.Errorf("container %s has %s=%q: want %q", container, variable, got, want)
		}
	}
}

// TestPodsShare: of two pods with one claim, the first to start has the VF. The other waits, with the reason in an event, until the first
// ends. A second pod also waits if the claim was generated from a template for the first.
func TestPodsShare(t *testing.T) {
	l := newLab(t, setup{})
	t.Run("at once", func(t *testing.T) {
		l := l.in(t)
		l.claim("vf", "nic")
		l.pod("one", "nic=vf")
		l.pod("two", "nic=vf")
		l.handOver("vf", "one", "two")
	})
	t.Run("one after the other", func(t *testing.T) {
		l := l.in(t)
		l.claim("later", "nic")
		l.pod("first", "nic=later")
		l.runs("first")
		l.pod("second", "nic=later")
		l.handOver("later", "first", "second")
	})
	t.Run("a generated claim", func(t *testing.T) {
		l := l.in(t)
		l.template("each", "nic")
		l.pod("owner", "nic=+each")
		l.runs("owner")
		claim := l.claimOf("owner", "nic")
		l.pod("guest", "nic="+claim)
		l.event("guest", "VF")
		l.attached("owner", l.allocated(claim)...)
		l.pending("guest")
		l.delete("guest")
		l.attached("owner", l.allocated(claim)...)
		l.delete("owner")
	})
}

// in returns a copy of the lab for a subtest, with the same node.
func (l *lab) in(t *testing.T) *lab {
	part := *l
	part.T = t
	return &part
}

// handOver checks that exactly one of two pods has the claim's VF, and that the other gets it afterwards.
func (l *lab) handOver(claim, one, two string) {
	l.Helper()
	within(l.T, "a pod of the two runs", func() error {
		for _, name := range []string{one, two} {
			p, err := l.getPod(name)
			if err == nil && isRunning(p) == nil {
				if name == two {
					one, two = two, one
				}
				return nil
			}
		}
		return errors.New("none does")
	})
	ids := l.allocated(claim)
	l.attached(one, ids...)
	l.Logf("event of %s: %s", two, l.event(two, "VF", l.ns+"/"+one))
	l.pending(two)
	l.attached(one, ids...)
	l.delete(one)
	l.runs(two)
	l.attached(two, ids...)
	l.delete(two)
}

// TestMissingClaim: a pod waits until its claim exists, and the kubelet does not call the daemon before.
func TestMissingClaim(t *testing.T) {
	l := newLab(t, setup{})
	l.pod("web", "nic=vf")
	l.pending("web")
	if err := errors.Join(l.noRecords(), l.allHome()); err != nil {
		t.Error(err)
	}
	l.claim("vf", "nic")
	l.runs("web")
	l.attached("web", l.allocated("vf")...)
}

// TestNoShare: each VF is allocated to at most one claim. If all are, the next pod waits until another ends.
func TestNoShare(t *testing.T) {
	l := newLab(t, setup{})
	l.template("vf", "nic")
	l.template("many", "a", "b", "c", "d", "e", "f", "g")
	l.pod("greedy", "nic=+many")
	l.pod("one", "nic=+vf")
	l.runs("greedy")
	l.runs("one")
	all := append(l.allocated(l.claimOf("greedy", "nic")), l.allocated(l.claimOf("one", "nic"))...)
	if slices.Sort(all); !slices.Equal(all, l.ids) {
		t.Errorf("allocated are %v", all)
	}
	for name, d := range l.devices() {
		if d.AllowMultipleAllocations != nil || len(d.Capacity) > 0 {
			t.Errorf("device %s: %+v", name, d)
		}
	}
	l.pod("late", "nic=+vf")
	l.event("late", "cannot allocate all claims")
	l.delete("one")
	l.runs("late")
	l.attached("late", l.allocated(l.claimOf("late", "nic"))...)
}
