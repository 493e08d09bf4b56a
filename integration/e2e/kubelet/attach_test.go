// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/daemon/podresources"
)

// TestAttach (V-18): each pod has its VFs before its first container starts, with the documented names (net1, net2 and so on) and order.
// After the pods, the VFs have their original settings.
func TestAttach(t *testing.T) {
	l := newVFLab(t)
	l.putPod("none", containerSpec{name: "app"})
	l.checkVFs("none", l.awaitRunning("none", ""))
	if records, _ := filepath.Glob("/run/podlace/*/sriov-*"); len(records) > 0 || len(journaledVFs(t)) > 0 {
		t.Errorf("a pod without VF has left %v, %v", records, journaledVFs(t))
	}
	l.putPod("one", containerSpec{name: "app", limits: vfs(1)})
	one := l.awaitRunning("one", "")
	l.checkVFs("one", one, l.allocatedVFs("one", "app", resource)...)
	l.putPod("two", containerSpec{name: "web"}, containerSpec{"zoo", podResources{resource: "2", slow: "1"}, false},
		containerSpec{"app", podResources{resource: "1", slow: "2"}, false})
	two := l.awaitRunning("two", "")
	want := slices.Concat(l.allocatedVFs("two", "zoo", slow), l.allocatedVFs("two", "zoo", resource), l.allocatedVFs("two", "app", slow),
		l.allocatedVFs("two", "app", resource))
	if len(want) != 6 {
		t.Fatalf("pod two was allocated %v", want)
	}
	l.checkVFs("two", two, want...)

	// DEL reverts the changes that an administrator makes to a VF in a pod's namespace.
	s, _ := sandboxOf("two")
	for _, change := range [][]string{{"mtu", "1300"}, {"promisc", "on"}, {"alias", "mine"}} {
		args := append([]string{"--net=" + s.netns, "ip", "link", "set", "net2"}, change...)
		if out, err := exec.Command("nsenter", args...).CombinedOutput(); err != nil {
			t.Errorf("%v: %v: %s", args, err, out)
		}
	}
	l.removePods("none", "one", "two")
	l.checkReturned()
}

// TestInitContainers: a VF that an init container shares with a later one is in the pod from the beginning. One that only an init container
// uses is not in the kubelet's list of the pod's devices, so ADD refuses such a pod, whether it gets the list from the daemon or from the
// kubelet.
func TestInitContainers(t *testing.T) {
	l := newVFLab(t)
	l.putPod("both", containerSpec{"prepare", vfs(1), true}, containerSpec{name: "app", limits: vfs(1)})
	both := l.awaitRunning("both", "")
	l.checkVFs("both", both, l.allocatedVFs("both", "app", resource)...)
	l.putPod("only", containerSpec{"prepare", vfs(1), true}, containerSpec{name: "app"})
	checkWithin(t, 40*time.Second, "an ADD is refused", func() error {
		if l.countRefusals() == 0 {
			return errors.New("none was")
		}
		return nil
	})
	if s, ok := sandboxOf("only"); ok {
		t.Errorf("the refused pod has the sandbox %+v", s)
	}
	l.removePods("both", "only")
	l.checkReturned()
}

// TestLostEntry (V-25): if the kubelet's checkpoint has lost the entry of a VF that only an init container has, ADD still refuses the pod,
// because the device plugin's own record shows that the kubelet's list is incomplete. Pods without VFs start meanwhile.
func TestLostEntry(t *testing.T) {
	l := newVFLab(t)
	path := podresources.At(kubeletRoot).Checkpoint
	var empty []byte
	checkWithin(t, 40*time.Second, "the kubelet writes a checkpoint without devices", func() (err error) {
		if empty, err = os.ReadFile(path); err != nil {
			return err
		}
		notes, err := podresources.CheckpointDevices(path)
		if err == nil && len(notes) > 0 {
			err = fmt.Errorf("it has %v", notes)
		}
		return err
	})
	l.putPod("only", containerSpec{"prepare", vfs(1), true}, containerSpec{name: "app"})
	checkWithin(t, 40*time.Second, "an ADD is refused", func() error {
		if l.countRefusals() == 0 {
			return errors.New("none was")
		}
		return nil
	})
	if err := errors.Join(os.WriteFile(path+".old", empty, 0o600), os.Rename(path+".old", path)); err != nil {
		t.Fatal(err)
	}
	former := l.countRefusals()
	l.putPod("plain", containerSpec{name: "app"})
	plain := l.awaitRunning("plain", "")
	l.checkVFs("plain", plain)
	checkWithin(t, 60*time.Second, "an ADD is refused without the entry", func() error {
		if n := l.countRefusals(); n <= former+1 { // one ADD may have begun before
			return fmt.Errorf("%d were, and %d before", n, former)
		}
		return nil
	})
	if notes, err := podresources.CheckpointDevices(path); err != nil || len(notes) > 0 {
		t.Errorf("the kubelet wrote the entry again, so this test is void: %v, %v", notes, err)
	}
	if s, ok := sandboxOf("only"); ok {
		t.Errorf("the refused pod has the sandbox %+v", s)
	}
	l.removePods("only", "plain")
	l.checkReturned()
}
