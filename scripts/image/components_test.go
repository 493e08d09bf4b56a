// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	machine "github.com/openshift/api/machineconfiguration/v1"
	security "github.com/openshift/api/security/v1"
	admission "k8s.io/api/admissionregistration/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	resource "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubelet "k8s.io/kubelet/config/v1beta1"
	sigsjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// typeOf returns a new, empty object of a kind that a manifest may contain.
func typeOf(kind string) meta.Object {
	switch kind {
	case "Namespace":
		return &core.Namespace{}
	case "ServiceAccount":
		return &core.ServiceAccount{}
	case "ConfigMap":
		return &core.ConfigMap{}
	case "ClusterRole":
		return &rbac.ClusterRole{}
	case "ClusterRoleBinding":
		return &rbac.ClusterRoleBinding{}
	case "DaemonSet":
		return &apps.DaemonSet{}
	case "DeviceClass":
		return &resource.DeviceClass{}
	case "ValidatingAdmissionPolicy":
		return &admission.ValidatingAdmissionPolicy{}
	case "ValidatingAdmissionPolicyBinding":
		return &admission.ValidatingAdmissionPolicyBinding{}
	case "SecurityContextConstraints":
		return &security.SecurityContextConstraints{}
	case "KubeletConfig":
		return &machine.KubeletConfig{}
	}
	return nil
}

// objectsByName contains the objects of a manifest. The key is the kind and name of an object.
type objectsByName map[string]meta.Object

// decodeObjects reads a manifest as strictly as an API server. Two objects must not have the same kind and name.
func decodeObjects(t *testing.T, text []byte) objectsByName {
	t.Helper()
	found := objectsByName{}
	for _, data := range bytes.Split(text, []byte("\n---\n")) {
		data = append(bytes.Clone(data), '\n') // belongs to the text of a ConfigMap
		var kind meta.TypeMeta
		if err := yaml.Unmarshal(data, &kind); err != nil {
			t.Fatalf("%v in\n%s", err, data)
		}
		o := typeOf(kind.Kind)
		if o == nil {
			t.Fatalf("kind %q in\n%s", kind.Kind, data)
		}
		decodeStrict(t, data, o)
		key := kind.Kind + " " + o.GetName()
		if found[key] != nil {
			t.Fatalf("two objects %s", key)
		}
		found[key] = o
	}
	return found
}

// decodeStrict decodes YAML as strictly as an API server: a duplicate or unknown key, or one with wrong letter case, is an error.
func decodeStrict(t *testing.T, text []byte, into any) {
	t.Helper()
	data, err := yaml.YAMLToJSONStrict(text)
	var mistakes []error
	if err == nil {
		mistakes, err = sigsjson.UnmarshalStrict(data, into)
	}
	if err := errors.Join(append(mistakes, err)...); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
}

func (d objectsByName) device(t *testing.T) *apps.DaemonSet {
	t.Helper()
	set, ok := d["DaemonSet sriov-device-plugin"].(*apps.DaemonSet)
	if !ok {
		t.Fatal("no DaemonSet sriov-device-plugin")
	}
	return set
}

// shippedFiles returns the objects in files of a component, and sets the test's image in these objects.
func shippedFiles(t *testing.T, component string, files ...string) objectsByName {
	t.Helper()
	all := objectsByName{}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(conf, "components", component, file))
		if err != nil {
			t.Fatal(err)
		}
		text = bytes.ReplaceAll(text, []byte("registry.example.com/podlace/sriov-device-plugin:latest"), []byte(testImage))
		for key, o := range decodeObjects(t, text) {
			all[key] = o
		}
	}
	return all
}

// The components sriov and dra add the objects of their files to the base, with its image. The conflist has the plugin sriov.
func TestSRIOVComponents(t *testing.T) {
	for component, files := range map[string][]string{
		"sriov": {"sriov-device-plugin.yaml"},
		"dra":   {"sriov-device-plugin-dra.yaml", "deviceclass.yaml"},
	} {
		t.Run(component, func(t *testing.T) {
			want := decodeObjects(t, rendered(t))
			for key, o := range shippedFiles(t, component, files...) {
				want[key] = o
			}
			want["ConfigMap podlace-node"].(*core.ConfigMap).Data["10-podlace.conflist"] = read(t, "sriov-conflist/10-podlace.conflist")
			if diff := cmp.Diff(want, decodeObjects(t, rendered(t, component))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// sriovEntry returns the keys of the plugin sriov, which must be the last plugin of the conflist.
func sriovEntry(t *testing.T, conflist string) map[string]json.RawMessage {
	t.Helper()
	var c struct{ Plugins []map[string]json.RawMessage }
	if err := json.Unmarshal([]byte(conflist), &c); err != nil || len(c.Plugins) == 0 {
		t.Fatalf("%v in %s", err, conflist)
	}
	last := c.Plugins[len(c.Plugins)-1]
	if kind := strings.TrimPrefix(string(last["type"]), `"podlace-`); strings.Trim(kind, `"`) != "sriov" {
		t.Fatalf("the last plugin is %s in %s", last["type"], conflist)
	}
	delete(last, "type")
	return last
}

// The conflist of sriov and dra is the base's with the plugin sriov, whose keys are those in conf/10-podlace-sriov.conflist. For each of
// the two, its `resources` has the resource of the device plugin's configuration.
func TestSRIOVConflist(t *testing.T) {
	text := read(t, "sriov-conflist/10-podlace.conflist")
	var base, ours struct{ Plugins []any }
	shipped := read(t, "base/10-podlace.conflist")
	if err := errors.Join(json.Unmarshal([]byte(shipped), &base), json.Unmarshal([]byte(text), &ours)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(base.Plugins, ours.Plugins[:len(ours.Plugins)-1]); diff != "" {
		t.Errorf("conf/cluster: copy the plugins of base/10-podlace.conflist into sriov-conflist/10-podlace.conflist, before sriov\n(-base +sriov)\n%s", diff)
	}
	head := func(s string) string { return s[:strings.Index(s, `"plugins"`)] }
	if diff := cmp.Diff(head(shipped), head(text)); diff != "" {
		t.Errorf("conf/cluster: copy the lines before \"plugins\" of base/10-podlace.conflist into sriov-conflist/10-podlace.conflist\n(-base +sriov)\n%s", diff)
	}
	entry := sriovEntry(t, text)
	if diff := cmp.Diff(sriovEntry(t, read(t, "../10-podlace-sriov.conflist")), entry); diff != "" {
		t.Errorf("copy the plugin sriov of conf/10-podlace-sriov.conflist into conf/cluster/sriov-conflist/10-podlace.conflist\n(-conf +cluster)\n%s", diff)
	}
	for _, component := range []string{"sriov", "dra"} {
		var config struct {
			ResourceList []struct{ ResourcePrefix, ResourceName string }
		}
		o := decodeObjects(t, rendered(t, component))["ConfigMap sriov-device-plugin"].(*core.ConfigMap)
		if err := json.Unmarshal([]byte(o.Data["config.json"]), &config); err != nil || len(config.ResourceList) != 1 {
			t.Fatalf("%v in %s", err, o.Data["config.json"])
		}
		r := config.ResourceList[0]
		if want := `["` + r.ResourcePrefix + "/" + r.ResourceName + `"]`; string(entry["resources"]) != want {
			t.Errorf("%s: the conflist has the resources %s, want %s", component, entry["resources"], want)
		}
	}
}

// noagent and openshift omit the agent, and install the plugins into the folder that the runtime or Multus searches.
func TestNoAgent(t *testing.T) {
	for component, folder := range map[string]string{"noagent": "/opt/cni/bin", "openshift": "/var/lib/cni/bin"} {
		for _, daemon := range []string{"sriov", "dra"} {
			got := decodeObjects(t, rendered(t, component, daemon))
			for key := range got {
				if strings.HasSuffix(key, " podlace-node") {
					t.Errorf("%s %s: %s is left", component, daemon, key)
				}
			}
			pod := got.device(t).Spec.Template.Spec
			if len(pod.InitContainers) != 1 || pod.InitContainers[0].Image != testImage ||
				!slices.Equal(pod.InitContainers[0].Command, []string{"/podlace-node", "install", "--bin-dir=/opt/cni/bin"}) {
				t.Fatalf("%s %s: %+v", component, daemon, pod.InitContainers)
			}
			mount := pod.InitContainers[0].VolumeMounts[0]
			i := slices.IndexFunc(pod.Volumes, func(v core.Volume) bool { return v.Name == mount.Name })
			if i < 0 || pod.Volumes[i].HostPath.Path != folder || mount.MountPath != "/opt/cni/bin" {
				t.Errorf("%s %s: the plugins do not go to %s: %+v, %+v", component, daemon, folder, mount, pod.Volumes)
			}
		}
	}
}

// TestOneNamespace checks that all objects are in the namespace of the agent.
func TestOneNamespace(t *testing.T) {
	for _, components := range [][]string{{"sriov"}, {"dra"}, {"dra", "noagent"}, {"dra", "openshift", "privileged"}} {
		text := rendered(t, components...)
		for key, o := range decodeObjects(t, text) {
			if o.GetNamespace() != "" && o.GetNamespace() != "podlace" {
				t.Errorf("%s: %s is in namespace %s", components, key, o.GetNamespace())
			}
		}
		if bytes.Contains(text, []byte("kube-system")) {
			t.Errorf("%s: the manifest names kube-system", components)
		}
	}
}

// The component privileged changes only the daemon's container, which can see what it restores.
func TestPrivileged(t *testing.T) {
	for _, component := range []string{"sriov", "dra"} {
		want, got := decodeObjects(t, rendered(t, component)), decodeObjects(t, rendered(t, component, "privileged"))
		pod := got.device(t).Spec.Template.Spec
		c := pod.Containers[0]
		if s := c.SecurityContext; s.Privileged == nil || !*s.Privileged || !*s.AllowPrivilegeEscalation || s.Capabilities != nil ||
			s.SeccompProfile.Type != core.SeccompProfileTypeUnconfined {
			t.Errorf("%s: %+v", component, s)
		}
		for _, folder := range []string{"/run/podlace", "/var/run/k8s.cni.cncf.io/devinfo/cni"} {
			i := slices.IndexFunc(c.VolumeMounts, func(m core.VolumeMount) bool { return m.MountPath == folder && !m.ReadOnly })
			if i < 0 || !slices.ContainsFunc(pod.Volumes, func(v core.Volume) bool {
				return v.Name == c.VolumeMounts[i].Name && v.HostPath != nil && v.HostPath.Path == folder
			}) {
				t.Errorf("%s: %s is not mounted: %+v", component, folder, c.VolumeMounts)
			}
		}
		before := want.device(t).Spec.Template.Spec.Containers[0]
		if len(pod.Containers) != 1 || !slices.Equal(c.Args, before.Args) || c.Image != before.Image {
			t.Errorf("%s: %+v", component, c)
		}
		const set = "DaemonSet sriov-device-plugin"
		delete(want, set)
		delete(got, set)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: other objects differ\n%s", component, diff)
		}
	}
	objects := decodeObjects(t, rendered(t, "openshift", "dra", "privileged"))
	scc := objects["SecurityContextConstraints podlace-sriov"].(*security.SecurityContextConstraints)
	if !scc.AllowPrivilegedContainer || !*scc.AllowPrivilegeEscalation || len(scc.RequiredDropCapabilities) > 0 ||
		!slices.Contains(scc.SeccompProfiles, "unconfined") {
		t.Errorf("the SecurityContextConstraints refuse a privileged container: %+v", scc)
	}
}

// The admission policies of the component dra and a role binding name the daemon's ServiceAccount.
func TestOpenShiftAccount(t *testing.T) {
	got := decodeObjects(t, rendered(t, "openshift", "dra"))
	account := got["ServiceAccount sriov-device-plugin"]
	user := "system:serviceaccount:" + account.GetNamespace() + ":" + account.GetName()
	policies := 0
	for _, o := range got {
		if p, ok := o.(*admission.ValidatingAdmissionPolicy); ok {
			policies++
			if c := p.Spec.MatchConditions; len(c) != 1 || !strings.HasSuffix(c[0].Expression, `"`+user+`"`) {
				t.Errorf("%s: %+v, want it for %s", p.Name, c, user)
			}
		}
	}
	if policies != 2 {
		t.Errorf("%d policies", policies)
	}
	binding := got["ClusterRoleBinding sriov-device-plugin"].(*rbac.ClusterRoleBinding)
	if diff := cmp.Diff([]rbac.Subject{{Kind: "ServiceAccount", Name: account.GetName(), Namespace: account.GetNamespace()}}, binding.Subjects); diff != "" {
		t.Error(diff)
	}
}

// The SecurityContextConstraints admit the DaemonSet and grant no right that it does not need.
func TestConstraints(t *testing.T) {
	for _, component := range []string{"sriov", "dra"} {
		got := decodeObjects(t, rendered(t, "openshift", component))
		scc := got["SecurityContextConstraints podlace-sriov"].(*security.SecurityContextConstraints)
		if diff := cmp.Diff("", refusalReason(scc, got.device(t))); diff != "" {
			t.Errorf("%s: %s", component, diff)
		}
		if scc.AllowPrivilegedContainer || *scc.AllowPrivilegeEscalation || scc.AllowHostPID || scc.AllowHostIPC || scc.AllowHostPorts {
			t.Errorf("it allows more than the DaemonSet needs: %+v", scc)
		}
	}
}

// refusalReason returns the reason why SecurityContextConstraints refuse a DaemonSet, or "".
func refusalReason(scc *security.SecurityContextConstraints, set *apps.DaemonSet) string {
	pod := set.Spec.Template.Spec
	switch {
	case set.Spec.Template.Annotations["openshift.io/required-scc"] != scc.Name:
		return "the DaemonSet requires another name"
	case !slices.Contains(scc.Groups, "system:serviceaccounts:"+set.Namespace):
		return "the namespace may not use it"
	case pod.HostNetwork && !scc.AllowHostNetwork:
		return "hostNetwork"
	case scc.SELinuxContext.Type != security.SELinuxStrategyMustRunAs ||
		pod.SecurityContext.SELinuxOptions.Type != scc.SELinuxContext.SELinuxOptions.Type:
		return "SELinux type"
	}
	for _, v := range pod.Volumes {
		kind := map[bool]security.FSType{true: security.FSTypeHostPath, false: security.FSTypeConfigMap}[v.HostPath != nil]
		if !slices.Contains(scc.Volumes, kind) || v.HostPath != nil && !scc.AllowHostDirVolumePlugin {
			return "volume " + v.Name
		}
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		s := c.SecurityContext
		for _, add := range s.Capabilities.Add {
			if !slices.Contains(scc.AllowedCapabilities, add) {
				return c.Name + ": capability " + string(add)
			}
		}
		if !slices.Equal(s.Capabilities.Drop, scc.RequiredDropCapabilities) || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem ||
			s.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault || !slices.Equal(scc.SeccompProfiles, []string{"runtime/default"}) {
			return c.Name + ": security context"
		}
	}
	return ""
}

// The KubeletConfig has the settings of conf/kubelet-numa.conf and no feature gate. No MachineConfigPool has the selector's label by
// default.
func TestKubeletConfig(t *testing.T) {
	got := decodeObjects(t, rendered(t, "openshift", "sriov"))["KubeletConfig podlace-numa"].(*machine.KubeletConfig)
	text, err := os.ReadFile(root + "/conf/kubelet-numa.conf")
	if err != nil {
		t.Fatal(err)
	}
	var want, settings kubelet.KubeletConfiguration
	decodeStrict(t, text, &want)
	want.TypeMeta = meta.TypeMeta{}
	decodeStrict(t, got.Spec.KubeletConfig.Raw, &settings)
	if diff := cmp.Diff(want, settings); diff != "" {
		t.Errorf("copy the settings of conf/kubelet-numa.conf into conf/cluster/components/openshift/kubeletconfig.yaml\n(-conf +openshift)\n%s", diff)
	}
	if len(settings.FeatureGates) > 0 {
		t.Errorf("feature gates: %v", settings.FeatureGates)
	}
	label, err := json.Marshal(got.Spec.MachineConfigPoolSelector)
	if err != nil || string(label) != `{"matchLabels":{"podlace.io/numa":"single-numa-node"}}` {
		t.Errorf("%v, pools with %s", err, label)
	}
}

// TestExclusiveComponents checks that incompatible components give an error with the reason.
func TestExclusiveComponents(t *testing.T) {
	for components, says := range map[string]string{
		"k3s crio":              "components k3s and crio exclude each other",
		"dra sriov":             "components sriov and dra exclude each other",
		"openshift":             "component openshift needs dra or sriov",
		"openshift sriov vxlan": "components openshift and vxlan exclude each other",
		"noroutes vxlan":        "components noroutes and vxlan exclude each other",
		"noroutes removal":      "components noroutes and removal exclude each other",
		"openshift dra removal": "components openshift and removal exclude each other",
		"vxlna":                 "no component",
		"noagent":               "component noagent needs dra or sriov",
		"noagent dra vxlan":     "components noagent and vxlan exclude each other",
		"openshift dra noagent": "components openshift and noagent exclude each other",
		"privileged":            "component privileged needs dra or sriov",
	} {
		if _, err := renderManifest(conf, testImage, strings.Fields(components), nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", components, err, says)
		}
	}
}
