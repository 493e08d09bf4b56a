// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	rbac "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/api/resource/v1beta2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// TestRights: the daemon's account has exactly the rights that it needs. It can write slices only for its own node and driver, and no
// claims.
func TestRights(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	config, err := clientcmd.BuildConfigFromFlags("", daemonKubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	daemon, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	api, other := daemon.ResourceV1(), "node9"
	slice := func(node, driver string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: l.ns + "-" + strings.ReplaceAll(node+driver, ".", "-")},
			Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &node,
				Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1}}}
	}
	foreign := slice(other, driverName)
	if _, err := l.client.ResourceV1().ResourceSlices().Create(t.Context(), foreign, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = l.client.ResourceV1().ResourceSlices().Delete(l.background(), foreign.Name, metav1.DeleteOptions{})
	})
	claim := l.getClaim("vf")
	for what, try := range map[string]func() error{
		"slice of another node": func() error {
			_, err := api.ResourceSlices().Create(t.Context(), slice("node8", driverName), metav1.CreateOptions{})
			return err
		},
		"slice of another driver": func() error {
			_, err := api.ResourceSlices().Create(t.Context(), slice(nodeName, stubDriver), metav1.CreateOptions{})
			return err
		},
		"slice of another driver, by an older version of the API": func() error {
			return createOlder(t, daemon, slice(nodeName, stubDriver))
		},
		"delete another node's slice": func() error { return api.ResourceSlices().Delete(t.Context(), foreign.Name, metav1.DeleteOptions{}) },
		"delete all slices": func() error {
			return api.ResourceSlices().DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{})
		},
		"update a claim": func() error {
			claim.Labels = map[string]string{"a": "b"}
			_, err := api.ResourceClaims(l.ns).Update(t.Context(), claim, metav1.UpdateOptions{})
			return err
		},
		"list claims": func() error {
			_, err := api.ResourceClaims(l.ns).List(t.Context(), metav1.ListOptions{})
			return err
		},
		"write a class": func() error { return api.DeviceClasses().Delete(t.Context(), l.class(), metav1.DeleteOptions{}) },
		"read pods": func() error {
			_, err := daemon.CoreV1().Pods(l.ns).List(t.Context(), metav1.ListOptions{})
			return err
		},
		"list nodes": func() error {
			_, err := daemon.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
			return err
		},
		"status of a claim that is not allocated": func() error {
			if !hasGate("DRAResourceClaimGranularStatusAuthorization") {
				return apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "vf", nil)
			}
			c := claim.DeepCopy()
			c.Labels = nil
			c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: stubDriver, Pool: nodeName, Device: "cpus-0"}}
			_, err := api.ResourceClaims(l.ns).UpdateStatus(t.Context(), c, metav1.UpdateOptions{})
			return err
		},
	} {
		if err := try(); !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		} else {
			t.Logf("%s: %v", what, err)
		}
	}
}

// createOlder creates a slice by v1beta2 of the API, to which the admission policy for v1 must also apply.
func createOlder(t *testing.T, client kubernetes.Interface, s *resourceapi.ResourceSlice) error {
	_, err := client.ResourceV1beta2().ResourceSlices().Create(t.Context(), &v1beta2.ResourceSlice{ObjectMeta: s.ObjectMeta,
		Spec: v1beta2.ResourceSliceSpec{Driver: s.Spec.Driver, NodeName: s.Spec.NodeName, Pool: v1beta2.ResourcePool(s.Spec.Pool)}},
		metav1.CreateOptions{})
	return err
}

// TestShipped: the API server accepts the whole shipped manifest, and the policy's type check reports no error.
func TestShipped(t *testing.T) {
	l := prepare(t, setup{})
	objects, err := shippedObjects()
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		o = o.DeepCopy()
		o.SetName(l.ns + "-" + o.GetName())
		if _, err := resourceOf(l.objects, o).Create(t.Context(), o, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll},
			FieldValidation: metav1.FieldValidationStrict}); err != nil {
			t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
		}
	}
	policies := l.client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	for _, name := range []string{"sriov-device-plugin", "sriov-device-plugin-claims"} {
		within(t, "the controller manager has checked the types of "+name, func() error {
			policy, err := policies.Get(t.Context(), name, metav1.GetOptions{})
			switch {
			case err != nil:
			case policy.Status.TypeChecking == nil || policy.Status.ObservedGeneration != policy.Generation:
				err = fmt.Errorf("generation %d: %+v", policy.Generation, policy.Status)
			case len(policy.Status.TypeChecking.ExpressionWarnings) > 0:
				t.Errorf("%s: %+v", name, policy.Status.TypeChecking.ExpressionWarnings)
			}
			return err
		})
	}
}

// withoutRule removes the rules for a resource from the daemon's ClusterRole until the test ends.
func (l *lab) withoutRule(resource string) {
	l.Helper()
	roles := l.client.RbacV1().ClusterRoles()
	before, err := roles.Get(l.background(), "sriov-device-plugin", metav1.GetOptions{})
	if err != nil {
		l.Fatal(err)
	}
	without := before.DeepCopy()
	without.Rules = slices.DeleteFunc(without.Rules, func(r rbac.PolicyRule) bool { return slices.Contains(r.Resources, resource) })
	if len(without.Rules) == len(before.Rules) {
		l.Fatalf("no rule names the resource %s: %+v", resource, before.Rules)
	}
	if _, err := roles.Update(l.background(), without, metav1.UpdateOptions{}); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		now, err := roles.Get(l.background(), "sriov-device-plugin", metav1.GetOptions{})
		if err == nil {
			now.Rules = before.Rules
			_, err = roles.Update(l.background(), now, metav1.UpdateOptions{})
		}
		if err != nil {
			l.Error(err)
		}
	})
}
