// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/podresources"
)

// TestUID: an answer has the pod's UID when the kubelet's checkpoint does not contradict it; and that no device is noted for a UID counts where the
// checkpoint was seen to have what this kubelet tells.
func TestUID(t *testing.T) {
	const resource = "example.com/one"
	l := prepareLab(t, twoPFs(t), twoPools)
	note := func(uidsAndDevices ...string) {
		t.Helper()
		var entries []string
		for i := 0; i < len(uidsAndDevices); i += 2 {
			entries = append(entries, `{"PodUID":"`+uidsAndDevices[i]+`","ContainerName":"app","ResourceName":"`+resource+`","DeviceIDs":{"0":["`+uidsAndDevices[i+1]+`"]},"AllocResp":""}`)
		}
		list := "null"
		if entries != nil {
			list = "[" + strings.Join(entries, ",") + "]"
		}
		write(t, filepath.Join(l.kubelet.dir, checkpointName), `{"Data":{"PodDeviceEntries":`+list+`,"RegisteredDevices":{}},"Checksum":1}`)
	}
	l.kubelet.start()
	note("u-0", vf00)
	l.kubelet.hold("shop", "web-0", "app", resource, vf00)
	d, err := open(l.Options, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.pods.Close() })
	expect := func(what, uid string, want string) {
		t.Helper()
		got := d.answer(t.Context(), allocation.Question{Namespace: "shop", Pod: "web-0", UID: uid, Resources: []string{resource}})
		if len(got.Devices) != 1 || got.Devices[0].ID != vf00 || got.UID != want || got.Error != "" {
			t.Errorf("%s: got %+v, want UID %q", what, got, want)
		}
	}
	expect("the pod", "u-0", "u-0")
	expect("a runtime that tells no UID", "", "")
	expect("another pod of its name, without devices", "u-1", "")
	note("u-0", vf00, "u-1", vf01)
	expect("another pod of its name, with another device", "u-1", "")

	kubelet := podresources.Kubelet{Socket: filepath.Join(l.Pods, "kubelet.sock"), Wanted: func(r string) bool { return r == resource }}
	counts := func(what, uid string, want bool) {
		t.Helper()
		if got := podresources.NoneNoted(l.Socket+podresources.TrustSuffix, kubelet, "shop", "other", uid); got != want {
			t.Errorf("%s: %s has no device: %t", what, uid, got)
		}
	}
	counts("not compared yet", "u-9", false)
	d.askPods(t.Context())
	counts("compared", "u-9", true)
	counts("compared", "u-1", false)
	counts("compared", "", false)
	kubelet.Wanted = func(r string) bool { return r == "example.com/other" }
	counts("of another resource", "u-1", true)
	l.kubelet.end()
	counts("no kubelet", "u-9", false)
	l.kubelet.start()
	counts("another kubelet", "u-9", false)
	d.askPods(t.Context())
	counts("another kubelet, compared", "u-9", true)
	note("u-0", vf00, "u-1", vf01)
	counts("written since", "u-9", false)
	note("u-8", vf00) // of a pod that had the device before
	d.askPods(t.Context())
	counts("another pod's, compared", "u-0", true)
	if podresources.NoneNoted(l.Socket+podresources.TrustSuffix, podresources.Kubelet{Socket: kubelet.Socket}, "shop", "web-0", "u-0") {
		t.Error("the kubelet tells of a device of web-0, and it has none")
	}
	note("u-0", vf01) // not what the kubelet tells
	d.askPods(t.Context())
	counts("contradicted", "u-9", false)
	note("u-0", vf00)
	d.askPods(t.Context())
	counts("compared again", "u-9", true)
	l.kubelet.release()
	d.askPods(t.Context())
	counts("more is noted than told", "u-9", false)
	note()
	counts("not compared", "u-9", false)
	d.askPods(t.Context())
	counts("nobody has a device", "u-9", true)
	write(t, filepath.Join(l.kubelet.dir, checkpointName), `{"Data":{"Entries":[]},"Checksum":1}`)
	d.askPods(t.Context())
	counts("another form", "u-9", false)
	if _, err := os.Stat(l.Socket + podresources.TrustSuffix); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("another form is to be believed: %v", err)
	}
	if err := os.Remove(filepath.Join(l.kubelet.dir, checkpointName)); err != nil {
		t.Fatal(err)
	}
	l.kubelet.hold("shop", "web-0", "app", resource, vf00)
	expect("no checkpoint", "u-0", "")
}
