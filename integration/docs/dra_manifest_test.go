// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admission "k8s.io/api/admissionregistration/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/claimcheck"
	"github.com/podlace/podlace/pkg/daemon/deviceplugin"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

const draManifest = "conf/cluster/components/dra/sriov-device-plugin-dra.yaml"

// kubeObject decodes the only object of its type in a manifest and rejects unknown keys.
func kubeObject[T runtime.Object](t *testing.T, file string) T {
	t.Helper()
	found := kubeObjects[T](t, file)
	if len(found) != 1 {
		t.Fatalf("%s has %d objects of type %T", file, len(found), found)
	}
	return found[0]
}

// kubeObjects decodes all objects of a type in a manifest and rejects unknown keys.
func kubeObjects[T runtime.Object](t *testing.T, file string) (found []T) {
	t.Helper()
	s := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, json.SerializerOptions{Yaml: true, Strict: true})
	for _, text := range strings.Split(readFile(t, file), "\n---\n") {
		o, _, err := s.Decode([]byte(text), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v in %s", file, err, text)
		}
		if o, ok := o.(T); ok {
			found = append(found, o)
		}
	}
	return found
}

// The daemon's ClusterRole grants exactly the necessary rights. Admission policies restrict how it may change ResourceSlices and the status
// of claims.
func TestRights(t *testing.T) {
	role, binding := kubeObject[*rbac.ClusterRole](t, draManifest), kubeObject[*rbac.ClusterRoleBinding](t, draManifest)
	account, set := kubeObject[*core.ServiceAccount](t, draManifest), kubeObject[*apps.DaemonSet](t, draManifest)
	got := map[string]string{}
	for _, r := range role.Rules {
		for _, resource := range r.Resources {
			got[strings.Join(r.APIGroups, ",")+"/"+resource] = strings.Join(r.Verbs, " ") + strings.Join(r.ResourceNames, " ")
		}
	}
	want := map[string]string{"/nodes": "get", "resource.k8s.io/resourceclaims": "get",
		"resource.k8s.io/resourceclaims/status": "patch",
		"resource.k8s.io/resourceclaims/driver": "associated-node:patch" + claim.Driver,
		"resource.k8s.io/resourceslices":        "get list watch create update delete"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s: the ClusterRole grants other rights than TestRights wants: change the rules, or want in %s\n(-want +manifest)\n%s", draManifest,
			"integration/docs/dra_manifest_test.go", diff)
	}
	subject := rbac.Subject{Kind: "ServiceAccount", Name: account.Name, Namespace: account.Namespace}
	if binding.RoleRef.Name != role.Name || !slices.Equal(binding.Subjects, []rbac.Subject{subject}) {
		t.Errorf("%s: the ClusterRoleBinding must bind %s to exactly the ServiceAccount %s: %+v", draManifest, role.Name, account.Name, binding)
	}
	if spec := set.Spec.Template.Spec; spec.ServiceAccountName != account.Name || set.Namespace != account.Namespace {
		t.Errorf("%s: the DaemonSet runs as %s/%s: write serviceAccountName: %s and namespace: %s", draManifest, set.Namespace,
			spec.ServiceAccountName, account.Name, account.Namespace)
	}
	policies := kubeObjects[*admission.ValidatingAdmissionPolicy](t, draManifest)
	bindings := kubeObjects[*admission.ValidatingAdmissionPolicyBinding](t, draManifest)
	if len(policies) != 2 || len(bindings) != 2 {
		t.Fatalf("%s: %d policies, %d bindings: write two of each", draManifest, len(policies), len(bindings))
	}
	user := "system:serviceaccount:" + account.Namespace + ":" + account.Name
	for i, policy := range policies {
		bound := bindings[i]
		if len(policy.Spec.MatchConditions) != 1 || !strings.Contains(policy.Spec.MatchConditions[0].Expression, `"`+user+`"`) ||
			bound.Spec.PolicyName != policy.Name || !slices.Equal(bound.Spec.ValidationActions, []admission.ValidationAction{admission.Deny}) {
			t.Errorf("%s: the policy %s must match only the user %s, and its binding must Deny: %+v, %+v", draManifest, policy.Name, user, policy.Spec,
				bound.Spec)
		}
	}
}

// An update of the DaemonSet starts the new pod before the old one ends. It uses only flags that the daemon has, mounts only folders and
// has one capability, and its configuration offers VFs by DRA.
func TestDRAManifest(t *testing.T) {
	set := kubeObject[*apps.DaemonSet](t, draManifest)
	if u := set.Spec.UpdateStrategy.RollingUpdate; u == nil || u.MaxSurge.IntValue() != 1 || u.MaxUnavailable.IntValue() != 0 {
		t.Errorf("%s: write updateStrategy with maxSurge: 1 and maxUnavailable: 0, not %+v", draManifest, set.Spec.UpdateStrategy)
	}
	spec := set.Spec.Template.Spec
	c := spec.Containers[0]
	var said bytes.Buffer
	if status := deviceplugin.Main(append(slices.Clone(c.Args), "--help"), &said); status != 0 {
		t.Errorf("%s: the daemon refuses the args %q: correct them, or add the flag: %s", draManifest, c.Args, &said)
	}
	if caps := c.SecurityContext.Capabilities; fmt.Sprint(caps.Drop, caps.Add) != "[ALL] [NET_ADMIN]" || c.SecurityContext.Privileged != nil {
		t.Errorf("%s: write capabilities: {drop: [ALL], add: [NET_ADMIN]}, without privileged, not %+v", draManifest, c.SecurityContext)
	}
	mounts := map[string]core.VolumeMount{}
	for _, m := range c.VolumeMounts {
		mounts[m.Name] = m
	}
	for _, v := range spec.Volumes {
		m, ok := mounts[v.Name]
		if delete(mounts, v.Name); !ok {
			t.Errorf("%s: the volume %s is not mounted: add it to volumeMounts, or remove it", draManifest, v.Name)
		}
		if v.HostPath == nil {
			continue
		}
		kind := map[bool]core.HostPathType{true: core.HostPathDirectory, false: core.HostPathDirectoryOrCreate}[m.ReadOnly && v.Name != "netns"]
		if m.MountPath != v.HostPath.Path || *v.HostPath.Type != kind {
			t.Errorf("%s: volume %s: write type: %s, and the same path as mountPath: %+v at %+v", draManifest, v.Name, kind, v.HostPath, m)
		}
	}
	if len(mounts) > 0 {
		t.Errorf("%s: volumeMounts name no volume: %v: add it to volumes, or remove it", draManifest, slices.Sorted(maps.Keys(mounts)))
	}
	text := kubeObject[*core.ConfigMap](t, draManifest).Data["config.json"]
	config, err := pool.Parse(pool.Source{File: draManifest, Prefix: "intel.com"}, []byte(text))
	if err != nil || len(config.Resources) == 0 || config.Resources[0].API != pool.DRA || len(config.Notes) > 0 {
		t.Errorf("%s: config.json must be valid, with \"api\": \"dra\": %v, %+v", draManifest, err, config)
	}
}

// The DeviceClass of the component dra equals the output of 'sriov-device-plugin classes' for the component's configuration.
func TestDeviceClass(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, []byte(kubeObject[*core.ConfigMap](t, draManifest).Data["config.json"]), 0o600); err != nil {
		t.Fatal(err)
	}
	var printed, said bytes.Buffer
	if status, _ := claimcheck.Run([]string{"classes", "--config-file", file}, nil, &printed, &said); status != 0 {
		t.Fatal(said.String())
	}
	const class = "conf/cluster/components/dra/deviceclass.yaml"
	head, shipped, _ := strings.Cut(readFile(t, class), "\napiVersion")
	_, want, _ := strings.Cut(printed.String(), "\napiVersion")
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(shipped, "\n")); diff == "" && want != "" {
		return
	} else if !*update {
		t.Fatalf("%s: 'sriov-device-plugin classes' prints another DeviceClass; run: %s\n(-program +file)\n%s", class, updateCommand("TestDeviceClass"), diff)
	}
	if err := os.WriteFile(filepath.Join(treeRoot, class), []byte(head+"\napiVersion"+want), 0o644); err != nil {
		t.Fatal(err)
	}
}
