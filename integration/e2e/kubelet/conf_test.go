// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"bytes"
	"os"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// The shipped manifests have no unknown field. The DaemonSet mounts folders of the node, but no single files, and has no capability.
func TestManifests(t *testing.T) {
	data, err := os.ReadFile("../../../conf/cluster/components/sriov/sriov-device-plugin.yaml")
	if err != nil {
		t.Fatal(err)
	}
	documents := bytes.Split(data, []byte("\n---\n"))
	if len(documents) != 2 {
		t.Fatalf("%d documents", len(documents))
	}
	var config core.ConfigMap
	var set apps.DaemonSet
	for i, into := range []any{&config, &set} {
		if err := yaml.UnmarshalStrict(documents[i], into); err != nil {
			t.Fatal(err)
		}
	}
	folders := 0
	for _, v := range set.Spec.Template.Spec.Volumes {
		if v.HostPath != nil && *v.HostPath.Type != core.HostPathDirectoryOrCreate {
			t.Errorf("%s is a %s", v.HostPath.Path, *v.HostPath.Type)
		} else if v.HostPath != nil {
			folders++
		}
	}
	security := set.Spec.Template.Spec.Containers[0].SecurityContext
	if folders != 5 || len(security.Capabilities.Drop) != 1 || security.Capabilities.Drop[0] != "ALL" || len(security.Capabilities.Add) > 0 ||
		security.Privileged != nil {
		t.Errorf("%d folders, %+v", folders, security)
	}
}
