// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// shippedManifest returns the expected objects of the shipped manifest.
func shippedManifest(t *testing.T) manifestObjects {
	t.Helper()
	const level = "pod-security.kubernetes.io/"
	inNamespace := meta.ObjectMeta{Name: "podlace-node", Namespace: "podlace"}
	return manifestObjects{
		namespace: core.Namespace{TypeMeta: kind("v1", "Namespace"), ObjectMeta: meta.ObjectMeta{Name: "podlace",
			Labels: map[string]string{level + "enforce": "privileged", level + "audit": "privileged", level + "warn": "privileged"}}},
		account: core.ServiceAccount{TypeMeta: kind("v1", "ServiceAccount"), ObjectMeta: inNamespace, AutomountServiceAccountToken: new(false)},
		role: rbac.ClusterRole{TypeMeta: kind(rbac.SchemeGroupVersion.String(), "ClusterRole"), ObjectMeta: meta.ObjectMeta{Name: "podlace-node"},
			Rules: []rbac.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}}}},
		binding: rbac.ClusterRoleBinding{TypeMeta: kind(rbac.SchemeGroupVersion.String(), "ClusterRoleBinding"),
			ObjectMeta: meta.ObjectMeta{Name: "podlace-node"},
			RoleRef:    rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: "podlace-node"},
			Subjects:   []rbac.Subject{{Kind: "ServiceAccount", Name: "podlace-node", Namespace: "podlace"}}},
		config: core.ConfigMap{TypeMeta: kind("v1", "ConfigMap"), ObjectMeta: inNamespace, Data: map[string]string{
			"config.json": read(t, "base/config.json"), "10-podlace.conflist": read(t, "base/10-podlace.conflist")}},
		agent: agent(inNamespace),
	}
}

func kind(version, kind string) meta.TypeMeta { return meta.TypeMeta{APIVersion: version, Kind: kind} }

func agent(of meta.ObjectMeta) apps.DaemonSet {
	selected := map[string]string{"app.kubernetes.io/name": "podlace-node"}
	of.Labels = map[string]string{"app.kubernetes.io/name": "podlace-node", "app.kubernetes.io/part-of": "podlace"}
	return apps.DaemonSet{TypeMeta: kind("apps/v1", "DaemonSet"), ObjectMeta: of, Spec: apps.DaemonSetSpec{
		Selector:        &meta.LabelSelector{MatchLabels: selected},
		MinReadySeconds: 5,
		UpdateStrategy: apps.DaemonSetUpdateStrategy{Type: apps.RollingUpdateDaemonSetStrategyType,
			RollingUpdate: &apps.RollingUpdateDaemonSet{MaxUnavailable: new(intstr.FromString("10%"))}},
		Template: core.PodTemplateSpec{ObjectMeta: meta.ObjectMeta{Labels: of.Labels}, Spec: core.PodSpec{
			ServiceAccountName:            "podlace-node",
			AutomountServiceAccountToken:  new(true),
			EnableServiceLinks:            new(false),
			PriorityClassName:             "system-node-critical",
			TerminationGracePeriodSeconds: new(int64(5)),
			HostNetwork:                   true,
			DNSPolicy:                     core.DNSDefault,
			NodeSelector:                  map[string]string{"kubernetes.io/os": "linux"},
			Tolerations:                   []core.Toleration{{Operator: core.TolerationOpExists}},
			Containers:                    []core.Container{container()},
			Volumes: []core.Volume{
				{Name: "config", VolumeSource: core.VolumeSource{ConfigMap: &core.ConfigMapVolumeSource{
					LocalObjectReference: core.LocalObjectReference{Name: "podlace-node"}}}},
				hostFolder("plugins", "/opt/cni/bin"), hostFolder("networks", "/etc/cni/net.d"), hostFolder("state", "/run/podlace"),
				hostFolder("leases", "/var/lib/cni"), hostFolder("namespaces", "/run/netns"),
				{Name: "sysctls", VolumeSource: core.VolumeSource{
					HostPath: &core.HostPathVolumeSource{Path: "/proc/sys/net", Type: new(core.HostPathDirectory)}}},
			},
		}},
	}}
}

func hostFolder(name, path string) core.Volume {
	return core.Volume{Name: name, VolumeSource: core.VolumeSource{
		HostPath: &core.HostPathVolumeSource{Path: path, Type: new(core.HostPathDirectoryOrCreate)}}}
}

func namespaces(at string) core.VolumeMount {
	return core.VolumeMount{Name: "namespaces", MountPath: at, ReadOnly: true, MountPropagation: new(core.MountPropagationHostToContainer)}
}

func container() core.Container {
	return core.Container{
		Name: "podlace-node", Image: testImage, ImagePullPolicy: core.PullIfNotPresent, Args: []string{"run"},
		Env: []core.EnvVar{
			{Name: "NODE_NAME", ValueFrom: &core.EnvVarSource{FieldRef: &core.ObjectFieldSelector{FieldPath: "spec.nodeName"}}},
		},
		ReadinessProbe: &core.Probe{ProbeHandler: get("/readyz"), PeriodSeconds: 2, TimeoutSeconds: 5},
		LivenessProbe: &core.Probe{ProbeHandler: get("/healthz"), InitialDelaySeconds: 10, PeriodSeconds: 20, TimeoutSeconds: 10,
			FailureThreshold: 6},
		SecurityContext: &core.SecurityContext{
			Privileged: new(false), RunAsUser: new(int64(0)), AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true),
			Capabilities:   &core.Capabilities{Add: []core.Capability{"NET_ADMIN"}, Drop: []core.Capability{"ALL"}},
			SeccompProfile: &core.SeccompProfile{Type: core.SeccompProfileTypeRuntimeDefault},
			SELinuxOptions: &core.SELinuxOptions{Type: "spc_t"},
		},
		Resources: core.ResourceRequirements{
			Requests: core.ResourceList{core.ResourceCPU: resource.MustParse("20m"), core.ResourceMemory: resource.MustParse("32Mi")},
			Limits:   core.ResourceList{core.ResourceMemory: resource.MustParse("128Mi")},
		},
		VolumeMounts: []core.VolumeMount{
			{Name: "config", MountPath: "/etc/podlace-node", ReadOnly: true}, {Name: "plugins", MountPath: "/opt/cni/bin"},
			{Name: "networks", MountPath: "/etc/cni/net.d"}, {Name: "state", MountPath: "/run/podlace"},
			{Name: "leases", MountPath: "/var/lib/cni", ReadOnly: true}, namespaces("/run/netns"),
			namespaces("/var/run/netns"), {Name: "sysctls", MountPath: "/host/proc/sys/net"},
		},
	}
}

func get(path string) core.ProbeHandler {
	return core.ProbeHandler{HTTPGet: &core.HTTPGetAction{Host: "127.0.0.1", Port: intstr.FromInt32(9810), Path: path}}
}

// Only a complete image name gives a manifest, because no public image of Podlace exists.
func TestImageNames(t *testing.T) {
	for image, want := range map[string]string{
		"registry.example.com/podlace:v1":               "registry.example.com/podlace:v1",
		"localhost:5000/a/b/podlace:v1-dirty":           "localhost:5000/a/b/podlace:v1-dirty",
		"registry.example.com/podlace@" + testDigest:    "registry.example.com/podlace@" + testDigest,
		"registry.example.com/podlace:v1@" + testDigest: "registry.example.com/podlace@" + testDigest,
	} {
		text, err := renderManifest(conf, image, nil, nil)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := parseManifest(t, text).agent.Spec.Template.Spec.Containers[0].Image; got != want {
			t.Errorf("%s became %s, want %s", image, got, want)
		}
	}
	for image, want := range map[string]string{
		"":                                    "make image PUSH=",
		"podlace":                             `image "podlace"`,
		"podlace:v1":                          "want REGISTRY/NAME@sha256:DIGEST or REGISTRY/NAME:TAG",
		"registry.example.com/podlace":        "want REGISTRY/NAME",
		"registry.example.com/podlace@sha256": "want REGISTRY/NAME",
		"registry.example.com/Podlace:v1":     "want REGISTRY/NAME",
		"a b/c:v1":                            "want REGISTRY/NAME",
	} {
		if _, err := renderManifest(conf, image, nil, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want it to say %s", image, err, want)
		}
	}
	_, err := renderManifest(conf, testImage, []string{"vxlna"}, nil)
	if err == nil || !strings.Contains(err.Error(), `"vxlna"; there are crio, debug, dra, k3s`) {
		t.Errorf("an unknown component: %v", err)
	}
}
