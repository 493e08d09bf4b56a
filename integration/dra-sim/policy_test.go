// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	admissionapi "k8s.io/api/admission/v1"
	registration "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	apiservercel "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"

	"github.com/podlace/podlace/pkg/claim"
)

const manifest = "../../conf/cluster/components/dra/sriov-device-plugin-dra.yaml"

// policyOf returns the admission policy with the given name from the manifest.
func policyOf(t *testing.T, name string) (p registration.ValidatingAdmissionPolicy) {
	t.Helper()
	data, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range strings.Split(string(data), "\n---\n") {
		var one registration.ValidatingAdmissionPolicy
		if err := yaml.Unmarshal([]byte(text), &one); err == nil && one.Kind == "ValidatingAdmissionPolicy" && one.Name == name {
			return one
		}
	}
	t.Fatalf("%s has no policy %s", manifest, name)
	return p
}

// compilePolicy compiles an admission policy's validations like the API server of this Kubernetes version.
func compilePolicy(t *testing.T, p registration.ValidatingAdmissionPolicy, kubernetes string) cel.ConditionEvaluator {
	t.Helper()
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(version.MustParse(kubernetes)))
	if err != nil {
		t.Fatal(err)
	}
	var variables []cel.NamedExpressionAccessor
	for _, v := range p.Spec.Variables {
		variables = append(variables, &validating.Variable{Name: v.Name, Expression: v.Expression})
	}
	var conditions []cel.ExpressionAccessor
	for _, v := range p.Spec.Validations {
		conditions = append(conditions, &validating.ValidationCondition{Expression: v.Expression})
	}
	with := cel.OptionalVariableDeclarations{HasAuthorizer: true}
	compiler.CompileAndStoreVariables(variables, with, environment.StoredExpressions)
	evaluator := compiler.CompileCondition(conditions, with, environment.StoredExpressions)
	if errs := evaluator.CompilationErrors(); len(errs) > 0 {
		t.Fatal(errs)
	}
	return evaluator
}

// refusedIndex returns the index of the first validation that refuses a claim's status update by the daemon of a node, or -1.
func refusedIndex(t *testing.T, e cel.ConditionEvaluator, node string, before, after *resourceapi.ResourceClaim) int {
	t.Helper()
	kind := resourceapi.SchemeGroupVersion.WithKind("ResourceClaim")
	attributes := admission.NewAttributesRecord(after, before, kind, after.Namespace, after.Name,
		schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: "resourceclaims"}, "status",
		admission.Update, nil, false, nil)
	request := &admissionapi.AdmissionRequest{Operation: admissionapi.Update,
		UserInfo: authenticationv1.UserInfo{Username: "system:serviceaccount:podlace:sriov-device-plugin"}}
	if node != "" {
		request.UserInfo.Extra = map[string]authenticationv1.ExtraValue{"authentication.kubernetes.io/node-name": {node}}
	}
	results, _, err := e.ForInput(t.Context(), &admission.VersionedAttributes{Attributes: attributes, VersionedKind: kind,
		VersionedObject: admission.NewLazyObject(after), VersionedOldObject: admission.NewLazyObject(before)}, request,
		cel.OptionalVariableBindings{}, nil, apiservercel.RuntimeCELCostBudget)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range results {
		if r.Error != nil {
			t.Fatalf("validation %d: %v", i, r.Error)
		}
		if r.EvalResult.Value() != true {
			return i
		}
	}
	return -1
}

// statusOf returns the entry of a device in the status of a claim.
func statusOf(driver, pool, device, data string) resourceapi.AllocatedDeviceStatus {
	return resourceapi.AllocatedDeviceStatus{Driver: driver, Pool: pool, Device: device, Data: &runtime.RawExtension{Raw: []byte(data)}}
}

// The admission policy for the status of claims lets a daemon change only entries of its own driver and node.
func TestStatusPolicy(t *testing.T) {
	const (
		allocation = iota
		reservedFor
		devices
		nodes
		none = -1
	)
	own := statusOf(claim.Driver, "node-a", "0000-3b-02-1", `{"vf": 1}`)
	gpu := statusOf("gpu.example.com", "node-a", "gpu-0", `{"mode": "x"}`)
	base := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "vf", Driver: claim.Driver, Pool: "node-a", Device: "0000-3b-02-1"}}}},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "web-0", UID: "u-0"}},
		Devices:     []resourceapi.AllocatedDeviceStatus{gpu}}}
	base.Name, base.Namespace = "vf", "shop"
	for _, c := range []struct {
		title  string
		node   string
		change func(before, after *resourceapi.ResourceClaim)
		want   int
	}{
		{"nothing", "node-a", func(_, _ *resourceapi.ResourceClaim) {}, none},
		{"own entry is new", "node-a", func(_, a *resourceapi.ResourceClaim) { a.Status.Devices = append(a.Status.Devices, own) }, none},
		{"own entry is new and first", "node-a", func(_, a *resourceapi.ResourceClaim) {
			a.Status.Devices = []resourceapi.AllocatedDeviceStatus{own, gpu}
		}, none},
		{"own entry changes", "node-a", func(b, a *resourceapi.ResourceClaim) {
			b.Status.Devices = append(b.Status.Devices, own)
			a.Status.Devices = append(a.Status.Devices, statusOf(claim.Driver, "node-a", "0000-3b-02-1", `{"vf": 2}`))
		}, none},
		{"own entry goes", "node-a", func(b, _ *resourceapi.ResourceClaim) { b.Status.Devices = append(b.Status.Devices, own) }, none},
		{"the first entry of all", "node-a", func(b, a *resourceapi.ResourceClaim) {
			b.Status.Devices, a.Status.Devices = nil, []resourceapi.AllocatedDeviceStatus{own}
		}, none},
		{"allocation changes", "node-a", func(_, a *resourceapi.ResourceClaim) { a.Status.Allocation.Devices.Results[0].Device = "x" }, allocation},
		{"allocation goes", "node-a", func(_, a *resourceapi.ResourceClaim) { a.Status.Allocation = nil }, allocation},
		{"allocation is new", "node-a", func(b, _ *resourceapi.ResourceClaim) { b.Status.Allocation = nil }, allocation},
		{"another pod", "node-a", func(_, a *resourceapi.ResourceClaim) { a.Status.ReservedFor[0].UID = types.UID("u-1") }, reservedFor},
		{"no pod", "node-a", func(_, a *resourceapi.ResourceClaim) { a.Status.ReservedFor = nil }, reservedFor},
		{"another driver's entry changes", "node-a", func(_, a *resourceapi.ResourceClaim) {
			a.Status.Devices[0].Data = &runtime.RawExtension{Raw: []byte(`{"mode": "y"}`)}
		}, devices},
		{"another driver's entry goes", "node-a", func(_, a *resourceapi.ResourceClaim) { a.Status.Devices = nil }, devices},
		{"another node's entry", "node-a", func(_, a *resourceapi.ResourceClaim) {
			a.Status.Devices = append(a.Status.Devices, statusOf(claim.Driver, "node-b", "0000-3b-02-1", `{}`))
		}, nodes},
		{"a token of no node", "", func(_, a *resourceapi.ResourceClaim) { a.Status.Devices = append(a.Status.Devices, own) }, nodes},
	} {
		for _, kubernetes := range []string{"1.34", "1.35", "1.37"} {
			e := compilePolicy(t, policyOf(t, "sriov-device-plugin-claims"), kubernetes)
			before, after := base.DeepCopy(), base.DeepCopy()
			c.change(before, after)
			if got := refusedIndex(t, e, c.node, before, after); got != c.want {
				t.Errorf("%s on %s: validation %d refuses, want %d", c.title, kubernetes, got, c.want)
			}
		}
	}
}
