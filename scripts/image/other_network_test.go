// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// TestOtherNetwork renders the Kustomize file in docs/DRA.md for a cluster with another network. Its objects must be the objects of the
// component dra, with the image of the quickstart and an init container that installs the plugins.
func TestOtherNetwork(t *testing.T) {
	document, err := os.ReadFile(root + "/docs/DRA.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := regexp.MustCompile("(?s)\n   ```text\n(   apiVersion: kustomize.config.k8s.io/.*?\n)   ```\n").FindSubmatch(document)
	if shown == nil {
		t.Fatal("docs/DRA.md shows no Kustomize file")
	}
	files := filesys.MakeFsInMemory()
	const file = "components/dra/sriov-device-plugin-dra.yaml"
	shipped, err := os.ReadFile(conf + "/" + file)
	if err == nil {
		err = files.WriteFile("/top/conf/cluster/"+file, shipped)
	}
	if err == nil {
		err = files.WriteFile("/top/kustomization.yaml", bytes.ReplaceAll(shown[1], []byte("\n   "), []byte("\n"))[3:])
	}
	if err != nil {
		t.Fatal(err)
	}
	all, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(files, "/top")
	if err != nil {
		t.Fatal(err)
	}
	text, err := all.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	const image = "registry.example.com/podlace:v1"
	got, want := decodeObjects(t, text), shippedFiles(t, "dra", "sriov-device-plugin-dra.yaml")
	if len(got) != len(want) || !strings.Contains(string(document), "make image PUSH="+image+"\n") {
		t.Errorf("%d objects, want %d, with the image %s", len(got), len(want), image)
	}
	pod := got["DaemonSet sriov-device-plugin"].(*apps.DaemonSet).Spec.Template.Spec
	if len(pod.InitContainers) != 1 || len(pod.Containers) != 1 || pod.InitContainers[0].Image != image || pod.Containers[0].Image != image ||
		!slices.Equal(pod.InitContainers[0].Command, []string{"/podlace-node", "install", "--bin-dir=/opt/cni/bin"}) {
		t.Errorf("%+v, %+v", pod.InitContainers, pod.Containers)
	}
	mount := pod.InitContainers[0].VolumeMounts[0]
	if !slices.ContainsFunc(pod.Volumes, func(v core.Volume) bool { return v.Name == mount.Name && v.HostPath.Path == mount.MountPath }) {
		t.Errorf("%+v, %+v", mount, pod.Volumes)
	}
}
