// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
)

// TestNoVFUncertain: a pod has no VFs only if PodResources, a readable checkpoint and, if it runs, the device plugin all say so.
// Otherwise, ADD fails with code 11.
func TestNoVFUncertain(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	k := &fakeKubelet{containers: []*api.ContainerResources{container("app")}}
	dir := k.serveSocket(t)
	other := checkpointOf(checkpointEntry("old", vf1))
	keys := func(uid string) []any {
		return []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0" + uid}
	}
	*l.refusal = poddevices.Answer{Error: "the list is of another pod"}
	writeCheckpoint(t, dir, other)
	l.Fails(l.Call("ADD", "a", keys(";K8S_POD_UID=new")...), plugin.CodeTryAgain,
		"the SR-IOV device plugin does not confirm that the pod has no VF")
	*l.refusal = poddevices.Answer{Error: "pod shop/web-0 may have " + vf1, Cause: poddevices.ErrUncertain}
	o := l.Call("ADD", "a", keys(";K8S_POD_UID=new")...)
	l.Fails(o, plugin.CodeTryAgain, "may have "+vf1)
	l.wantHint(o, "retry in a minute: 'podlace sriov ls' shows the VF")
	*l.refusal = poddevices.Refusal(fmt.Errorf("the pod has claim shop/vf: %w", poddevices.ErrUnprepared))
	o = l.Call("ADD", "a", keys(";K8S_POD_UID=new")...)
	l.Fails(o, plugin.CodeTryAgain, "the pod has claim shop/vf: the claim is not prepared")
	l.wantHint(o, "check that sriov-device-plugin is running, because it prepares claims")
	must(t, os.Remove(l.sriov.socket))
	for what, c := range map[string]struct{ checkpoint, uid, says, hint string }{
		"torn checkpoint": {other[:100], "new", "checkpoint", "check that the kubelet is running with the folder " + dir},
		"checkpoint of another form": {`{"Data":{"Pods":[]},"Checksum":1}`, "new", "or an entry lacks UID",
			"check that the kubelet is running with the folder " + dir},
		"no UID": {other, "", "the runtime does not pass the pod's UID", "the runtime must pass K8S_POD_UID"},
	} {
		writeCheckpoint(t, dir, c.checkpoint)
		t.Log(what)
		o := l.Call("ADD", "a", keys(";K8S_POD_UID="+c.uid)...)
		l.Fails(o, plugin.CodeTryAgain, c.says)
		l.wantHint(o, c.hint)
	}
	writeCheckpoint(t, dir, checkpointOf())
	o = l.Call("ADD", "a", append(keys(";K8S_POD_UID=new"), "CNI_PATH", "/nonexistent")...)
	l.Fails(o, plugin.CodeTryAgain, poddevices.Program+", which asks the kubelet in place of the device plugin, is not installed")
	l.wantHint(o, "install "+poddevices.Program+" beside sriov, and start sriov-device-plugin")
	must(t, os.Remove(filepath.Join(dir, "device-plugins/kubelet_internal_checkpoint")))
	o = l.Call("ADD", "a", keys(";K8S_POD_UID=new")...)
	l.Fails(o, plugin.CodeTryAgain, "checkpoint")
	l.wantHint(o, "no device plugin has registered with the kubelet: remove sriov from the conflist, or start sriov-device-plugin")
	for _, text := range []string{other, `{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}`} {
		writeCheckpoint(t, dir, text)
		if a := l.add("a", keys(";K8S_POD_UID=new")...); len(a.result.Interfaces) != 1 {
			t.Errorf("%s", a.prev)
		}
	}
	l.isGolden()
}

func (l testLab) wantHint(o outcome, hint string) {
	l.Helper()
	if _, got, _ := strings.Cut(o.Failure.Details, "; "); !strings.HasPrefix(got, hint) || strings.Contains(got, "; ") {
		l.Errorf("%s: want the hint %q", o.Failure.Details, hint)
	}
}

// TestNoVFByClaims: where pods get VFs through claims, the kubelet may have no checkpoint. ADD of a pod without VFs succeeds
// nevertheless.
func TestNoVFByClaims(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	k := &fakeKubelet{containers: []*api.ContainerResources{container("app")}}
	dir := k.serveSocket(t)
	must(t, os.Remove(l.sriov.socket))
	keys := []any{"kubeletDir", dir, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=new"}
	l.Fails(l.Call("ADD", "a", keys...), plugin.CodeTryAgain, "checkpoint")
	must(t, claim.MakeFolder(l.sriov.claims))
	if a := l.add("a", keys...); len(a.result.Interfaces) != 1 {
		t.Errorf("%s", a.prev)
	}
	l.isGolden()
}

// TestStatusKubeletDir: STATUS warns once if kubeletDir is not the folder of a kubelet, and again if the folder appears and later
// disappears.
func TestStatusKubeletDir(t *testing.T) {
	l := newLab(t)
	root := t.TempDir()
	status := func(warns bool, keys ...any) {
		t.Helper()
		o := l.OK(l.Call("STATUS", "a", append([]any{"kubeletDir", root}, keys...)...))
		if got := strings.Contains(o.Log, "Set kubeletDir to the --root-dir of the kubelet"); got != warns {
			t.Errorf("warned: %v, want %v; log: %s", got, warns, o.Log)
		}
	}
	status(true)
	status(false)
	sockets := filepath.Join(root, "pod-resources")
	must(t, os.Mkdir(sockets, 0o755))
	status(false)
	must(t, os.Remove(sockets))
	status(true)
}
