// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestSliceRefused (failure 20): while the API server refuses slices, the old ones stay, the daemon logs one line and counts the refusal,
// and the device plugin API works. The daemon writes its slices once they are accepted.
func TestSliceRefused(t *testing.T) {
	needGate(t, "DRADeviceTaints")
	l := prepare(t, setup{config: half})
	l.run()
	l.ready()
	within(t, "the VFs of a PF are in slices", func() error { return l.offers(l.ids[:4]...) })
	name := l.ns + "-refuse"
	l.create(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: ` + name + `}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [resource.k8s.io], apiVersions: ["*"], operations: [CREATE, UPDATE], resources: [resourceslices]}]
  validations: [{expression: "!object.spec.devices.exists(d, has(d.taints))", message: "spec.devices[0].taints: this cluster takes none"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: ` + name + `}
spec: {policyName: ` + name + `, validationActions: [Deny]}
`)
	time.Sleep(2 * time.Second) // the API server applies policies with a delay
	former := l.slices()
	l.carrier(pf0, pf0Name, false)
	within(t, "the daemon says that slices are refused", func() error {
		if l.says("spec.devices[0].taints") == 0 {
			return errors.New("it says nothing")
		}
		return nil
	})
	remains(t, "the slices stay, and the daemon logs it once", func() error {
		if n := l.says("spec.devices[0].taints"); n > 1 {
			return fmt.Errorf("the daemon logged the reason %d times, want once", n)
		}
		if now := l.slices(); now[0].ResourceVersion != former[0].ResourceVersion {
			return fmt.Errorf("the slices are %+v", now)
		}
		return allocatableNow(4)
	})
	if got := l.metric("podlace_sriov_dra_slices_refused") + l.metric("podlace_sriov_dra_up"); got != "10" {
		t.Errorf("slices_refused and up are %s: want 1 and 0", got)
	}
	policies := l.client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	if err := policies.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	l.carrier(pf0, pf0Name, true)
	time.Sleep(12 * time.Second)
	l.carrier(pf0, pf0Name, false)
	within(t, "the taints are in the slices", func() error { return l.tainted(pf0, true) })
	if got := l.metric("podlace_sriov_dra_slices_refused"); got != "0" {
		t.Errorf("slices_refused is %s", got)
	}
}

// TestNodeName (failure 30): without a Node object of its node name, the daemon publishes nothing, logs this once, and retries.
func TestNodeName(t *testing.T) {
	l := prepare(t, setup{config: half})
	l.flags = []string{"--node-name", "node9"} // the last flag takes effect
	const hint = "set --node-name to the name of the Node object"
	mark := l.mark()
	l.run()
	within(t, "the kubelet may give away the VFs of the device plugin", func() error { return allocatableNow(4) })
	within(t, "the daemon says what is wrong", func() error {
		if l.says(hint) == 0 {
			return errors.New("the daemon has not logged the reason")
		}
		return nil
	})
	remains(t, "the daemon logs it once", func() error {
		if n := l.says(hint); n != 1 {
			return fmt.Errorf("the daemon logged the reason %d times, want once", n)
		}
		return nil
	})
	if w := l.writes(mark, ""); len(w) > 0 {
		t.Errorf("it wrote %+v", w)
	}
	l.flags = nil
	l.restart(15)
	within(t, "the VFs of a PF are in slices", func() error { return l.offers(l.ids[:4]...) })
}
