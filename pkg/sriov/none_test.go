// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"os"
	"testing"

	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/plugin"
)

// TestNoVFUncertain (V-25): ADD fails with code 11 unless PodResources and a readable checkpoint agree that the pod has no VF, and the device plugin,
// if it runs, agrees too.
func TestNoVFUncertain(t *testing.T) {
	l := newLab(t)
	k := &kubelet{containers: []*api.ContainerResources{container("app")}}
	dir := k.serve(t)
	other := noted(entry("old", vf1))
	keys := func(uid string) []any {
		return []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0" + uid}
	}
	*l.unsure = true
	note(t, dir, other)
	l.fails(l.call("ADD", "a", keys(";K8S_POD_UID=new")...), plugin.CodeTryAgain, "the SR-IOV device plugin does not confirm that the pod has no VF")
	must(t, os.Remove(l.sriov.socket))
	for what, c := range map[string]struct{ checkpoint, uid, says string }{
		"torn checkpoint":            {other[:100], "new", "checkpoint"},
		"checkpoint of another form": {`{"Data":{"Pods":[]},"Checksum":1}`, "new", "no entries with UID"},
		"no UID":                     {other, "", "the runtime does not say the pod's UID"},
	} {
		note(t, dir, c.checkpoint)
		t.Log(what)
		l.fails(l.call("ADD", "a", keys(";K8S_POD_UID="+c.uid)...), plugin.CodeTryAgain, c.says)
	}
	for _, text := range []string{other, `{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}`} {
		note(t, dir, text)
		if a := l.add("a", keys(";K8S_POD_UID=new")...); len(a.result.Interfaces) != 1 {
			t.Errorf("%s", a.prev)
		}
	}
	l.isGolden()
}
