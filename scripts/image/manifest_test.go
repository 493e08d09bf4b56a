// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const (
	conf       = root + "/conf/cluster"
	testDigest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	testImage  = "registry.example.com/team/podlace@" + testDigest
)

// manifestObjects contains the objects of the manifest, one of each type.
type manifestObjects struct {
	namespace core.Namespace
	account   core.ServiceAccount
	role      rbac.ClusterRole
	binding   rbac.ClusterRoleBinding
	config    core.ConfigMap
	agent     apps.DaemonSet
}

// parseManifest reads a manifest as strictly as an API server. An unknown or duplicate key fails the test.
func parseManifest(t *testing.T, text []byte) (o manifestObjects) {
	t.Helper()
	want := []struct {
		kind string
		into any
	}{{"v1 Namespace", &o.namespace}, {"v1 ServiceAccount", &o.account}, {"rbac.authorization.k8s.io/v1 ClusterRole", &o.role},
		{"rbac.authorization.k8s.io/v1 ClusterRoleBinding", &o.binding}, {"v1 ConfigMap", &o.config}, {"apps/v1 DaemonSet", &o.agent}}
	documents := bytes.Split(text, []byte("\n---\n"))
	if len(documents) != len(want) {
		t.Fatalf("%d objects, want %d", len(documents), len(want))
	}
	for i, data := range documents {
		var kind meta.TypeMeta
		if err := yaml.Unmarshal(data, &kind); err != nil {
			t.Fatal(err)
		}
		if got := kind.APIVersion + " " + kind.Kind; got != want[i].kind {
			t.Fatalf("object %d is a %s, want %s", i, got, want[i].kind)
		}
		if err := yaml.UnmarshalStrict(data, want[i].into); err != nil {
			t.Fatalf("%s: %v", want[i].kind, err)
		}
	}
	return o
}

func rendered(t *testing.T, components ...string) []byte {
	t.Helper()
	text, err := renderManifest(conf, testImage, components, nil)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestManifest compares every field of the shipped manifest.
func TestManifest(t *testing.T) {
	text := rendered(t)
	if diff := differences(parseManifest(t, text), shippedManifest(t)); diff != "" {
		t.Errorf("conf/cluster/base has other fields than the test wants: change them there, or in scripts/image/shipped_test.go\n%s", diff)
	}
	if again := rendered(t); !bytes.Equal(text, again) {
		t.Error("rendered twice, it differs")
	}
}

// The comparison of TestManifest finds each forbidden right.
func TestRightsAreNoticed(t *testing.T) {
	text := string(rendered(t))
	for _, change := range [][2]string{
		{"privileged: false", "privileged: true"},
		{"allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"},
		{"readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"},
		{"            - NET_ADMIN\n", "            - NET_ADMIN\n            - SYS_ADMIN\n"},
		{"            drop:\n            - ALL\n", ""},
		{"type: RuntimeDefault", "type: Unconfined"},
		{"hostNetwork: true", "hostNetwork: true\n      hostPID: true"},
		{"hostNetwork: true", "hostNetwork: true\n      hostIPC: true"},
		{"  - watch\n", "  - watch\n  - patch\n"},
		{"  - nodes\n", "  - nodes\n  - nodes/status\n"},
		{"  - nodes\n", "  - nodes\n  - pods\n"},
		{"  - get\n", "  - '*'\n"},
		{"  - watch\n", "  - watch\n- nonResourceURLs: ['*']\n  verbs: [get]\n"},
		{"subjects:\n", "subjects:\n- kind: Group\n  apiGroup: rbac.authorization.k8s.io\n  name: system:authenticated\n"},
		{"  kind: ClusterRole\n  name: podlace-node\nsubjects", "  kind: ClusterRole\n  name: cluster-admin\nsubjects"},
		{"path: /run/podlace\n", "path: /\n"},
		{"path: /run/podlace\n          type: DirectoryOrCreate", "path: /run/podlace"},
		{"      volumes:\n", "      volumes:\n      - name: root\n        hostPath: {path: /}\n"},
		{"      containers:\n", "      initContainers:\n      - {name: more, image: x}\n      containers:\n"},
		{"      containers:\n", "      securityContext: {sysctls: [{name: net.ipv4.ip_forward, value: '1'}]}\n      containers:\n"},
		{"        resources:\n", "        ports: [{containerPort: 9810}]\n        resources:\n"},
		{"host: 127.0.0.1", "host: 0.0.0.0"},
		{"            memory: 128Mi", "            memory: 1Gi"},
		{"image: " + testImage, "image: " + testImage[:len(testImage)-1] + "0"},
		{"automountServiceAccountToken: false", "automountServiceAccountToken: true"},
		{`"antiSpoof": true`, `"antiSpoof": false`},
	} {
		t.Run(change[1], func(t *testing.T) {
			changed := strings.Replace(text, change[0], change[1], 1)
			if changed == text {
				t.Fatalf("%q is not in the manifest", change[0])
			}
			if differences(parseManifest(t, []byte(changed)), shippedManifest(t)) == "" {
				t.Errorf("nothing noticed %q in place of %q", change[1], change[0])
			}
		})
	}
}

// TestStrictTypes checks that a misspelt key and a duplicate key are errors.
func TestStrictTypes(t *testing.T) {
	for _, text := range []string{"spec: {hostnetwork: true}", "spec: {template: {spec: {hostNetwork: true, hostNetwork: false}}}"} {
		if err := yaml.UnmarshalStrict([]byte(text), &apps.DaemonSet{}); err == nil {
			t.Errorf("%s is taken", text)
		}
	}
}

// TestComponents renders the agent's components and combinations of them. TestSRIOVComponents and TestOpenShift render all others.
func TestComponents(t *testing.T) {
	vxlan := func(o *manifestObjects) { o.config.Data["config.json"] = read(t, "components/vxlan/config.json") }
	folder := func(name, path string) func(*manifestObjects) {
		return func(o *manifestObjects) {
			for _, v := range o.agent.Spec.Template.Spec.Volumes {
				if v.Name == name {
					v.HostPath.Path = path
				}
			}
		}
	}
	k3s := []func(*manifestObjects){folder("plugins", "/var/lib/rancher/k3s/data/cni"),
		folder("networks", "/var/lib/rancher/k3s/agent/etc/cni/net.d")}
	removal := func(o *manifestObjects) {
		everywhere := *o.agent.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable
		everywhere.StrVal = "100%"
		o.agent.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable = &everywhere
		c := &o.agent.Spec.Template.Spec.Containers[0]
		c.Args, c.LivenessProbe = []string{"remove", "--wait"}, nil
		yes := true
		c.SecurityContext.Privileged, c.SecurityContext.AllowPrivilegeEscalation = &yes, &yes
		i := slices.IndexFunc(c.VolumeMounts, func(m core.VolumeMount) bool { return m.Name == "leases" })
		leases := c.VolumeMounts[i]
		leases.ReadOnly = false // DEL removes leases
		// The component's patch moves the volume mount of the leases to the front of the list.
		c.VolumeMounts = append([]core.VolumeMount{leases}, slices.Delete(slices.Clone(c.VolumeMounts), i, i+1)...)
	}
	noroutes := func(o *manifestObjects) {
		o.config.Data["config.json"] = read(t, "components/noroutes/config.json")
		o.agent.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add = nil
		withoutHealing(o)
	}
	debug := func(o *manifestObjects) {
		o.agent.Spec.Template.Spec.HostPID = true
		c := &o.agent.Spec.Template.Spec.Containers[0]
		c.Env = append([]core.EnvVar{{Name: "PODLACE_MOUNTS", Value: "/proc/1/ns/mnt"}}, c.Env...)
		yes := true
		c.SecurityContext.Privileged, c.SecurityContext.AllowPrivilegeEscalation = &yes, &yes
		c.SecurityContext.Capabilities = &core.Capabilities{Add: []core.Capability{"ALL"}}
		c.SecurityContext.SeccompProfile.Type = core.SeccompProfileTypeUnconfined
	}
	noconfig := func(o *manifestObjects) {
		o.config.Data["config.json"] = read(t, "components/noroutes/config.json")
		withoutHealing(o)
	}
	cases := map[string][]func(*manifestObjects){
		"debug": {debug}, "noroutes debug": {noconfig, debug},
		"noroutes": {noroutes}, "noroutes k3s": append([]func(*manifestObjects){noroutes}, k3s...),
		"vxlan": {vxlan}, "k3s": k3s, "crio": {folder("plugins", "/usr/libexec/cni")}, "removal": {removal},
		"vxlan k3s": append([]func(*manifestObjects){vxlan}, k3s...), "k3s removal": append([]func(*manifestObjects){removal}, k3s...),
	}
	known, err := componentNames(conf)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range known {
		if cases[name] == nil && !slices.Contains([]string{"dra", "noagent", "openshift", "privileged", "sriov"}, name) {
			t.Errorf("no case renders the component %s", name)
		}
	}
	for names, changes := range cases {
		t.Run(names, func(t *testing.T) {
			want := shippedManifest(t)
			for _, change := range changes {
				change(&want)
			}
			if diff := differences(parseManifest(t, rendered(t, strings.Fields(names)...)), want); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// withoutHealing drops what the agent needs only to restore the network of pods.
func withoutHealing(o *manifestObjects) {
	o.role.Rules = o.role.Rules[:1]
	spec := &o.agent.Spec.Template.Spec
	spec.Volumes = slices.DeleteFunc(spec.Volumes, func(v core.Volume) bool { return v.Name == "sysctls" })
	c := &spec.Containers[0]
	c.VolumeMounts = slices.DeleteFunc(c.VolumeMounts, func(m core.VolumeMount) bool { return m.Name == "sysctls" })
}

// differences compares two manifests without the order of volumes, which patches change.
func differences(got, want manifestObjects) string {
	byName := cmpopts.SortSlices(func(a, b core.Volume) bool { return a.Name < b.Name })
	return cmp.Diff(want, got, cmp.AllowUnexported(manifestObjects{}), byName)
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(conf, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestRemovalNote checks that a removal prints a note if the user chose no component that sets folders.
func TestRemovalNote(t *testing.T) {
	for components, noted := range map[string]bool{"removal": true, "vxlan removal": true, "k3s removal": false,
		"removal crio": false, "vxlan": false} {
		if got := removalNote(strings.Fields(components)); (got != "") != noted {
			t.Errorf("%s: %q", components, got)
		}
	}
}

// TestMissingPart checks that the error of an incomplete image name contains the missing part.
func TestMissingPart(t *testing.T) {
	for image, says := range map[string]string{"myuser/podlace:v1": "the registry is missing, as in docker.io/myuser/podlace:v1",
		"podlace": "the registry is missing", "registry.example.com/podlace": "the tag or the digest is missing, as in registry.example.com/podlace:v1",
		"localhost:5000/podlace": "the tag or the digest", "registry.example.com/Pod lace:v1": "want REGISTRY/NAME"} {
		if _, err := parseImage(image); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", image, err, says)
		}
	}
}
