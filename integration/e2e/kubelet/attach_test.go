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

	"github.com/podlace/podlace/pkg/podresources"
)

// TestAttach (V-18): pods have their VFs when their first container starts, with the documented interface numbers, and return them
// with their original settings.
func TestAttach(t *testing.T) {
	l := newVFLab(t)
	l.put("none", container{name: "app"})
	l.has("none", l.up("none", ""))
	if records, _ := filepath.Glob("/run/podlace/*/sriov-*"); len(records) > 0 || len(journals(t)) > 0 {
		t.Errorf("a pod without VF has left %v, %v", records, journals(t))
	}
	l.put("one", container{name: "app", limits: vfs(1)})
	one := l.up("one", "")
	l.has("one", one, l.allocated("one", "app", resource)...)
	l.put("two", container{name: "web"}, container{"zoo", resources{resource: "2", slow: "1"}, false},
		container{"app", resources{resource: "1", slow: "2"}, false})
	two := l.up("two", "")
	want := slices.Concat(l.allocated("two", "zoo", slow), l.allocated("two", "zoo", resource), l.allocated("two", "app", slow),
		l.allocated("two", "app", resource))
	if len(want) != 6 {
		t.Fatalf("pod two was allocated %v", want)
	}
	l.has("two", two, want...)

	// An administrator's changes in a pod's namespace do not stay on the VF.
	s, _ := sandboxOf("two")
	for _, change := range [][]string{{"mtu", "1300"}, {"promisc", "on"}, {"alias", "mine"}} {
		args := append([]string{"--net=" + s.netns, "ip", "link", "set", "net2"}, change...)
		if out, err := exec.Command("nsenter", args...).CombinedOutput(); err != nil {
			t.Errorf("%v: %v: %s", args, err, out)
		}
	}
	l.remove("none", "one", "two")
	l.allHome()
}

// TestInitContainers: a VF that an init container shares with a later container is in the pod from the beginning. The kubelet does not
// report a VF of an init container only, so ADD refuses the pod, whether the daemon or the kubelet answers.
func TestInitContainers(t *testing.T) {
	l := newVFLab(t)
	l.put("both", container{"prepare", vfs(1), true}, container{name: "app", limits: vfs(1)})
	both := l.up("both", "")
	l.has("both", both, l.allocated("both", "app", resource)...)
	l.put("only", container{"prepare", vfs(1), true}, container{name: "app"})
	within(t, 40*time.Second, "an ADD is refused", func() error {
		if l.refusals() == 0 {
			return errors.New("none was")
		}
		return nil
	})
	if s, ok := sandboxOf("only"); ok {
		t.Errorf("the refused pod has the sandbox %+v", s)
	}
	l.remove("both", "only")
	l.allHome()
}

// TestLostEntry (V-25): only an init container of a pod has a VF, and the kubelet's checkpoint has lost its entry. The pod does not
// start, because the device plugin knows that it allocated the VF. Pods without VFs start meanwhile.
func TestLostEntry(t *testing.T) {
	l := newVFLab(t)
	path := podresources.At(kubeletRoot).Checkpoint
	empty, err := os.ReadFile(path)
	if notes, err2 := podresources.CheckpointDevices(path); err != nil || err2 != nil || len(notes) > 0 {
		t.Fatalf("%v, %v: %v", notes, err, err2)
	}
	l.put("only", container{"prepare", vfs(1), true}, container{name: "app"})
	within(t, 40*time.Second, "an ADD is refused", func() error {
		if l.refusals() == 0 {
			return errors.New("none was")
		}
		return nil
	})
	if err := errors.Join(os.WriteFile(path+".old", empty, 0o600), os.Rename(path+".old", path)); err != nil {
		t.Fatal(err)
	}
	former := l.refusals()
	l.put("plain", container{name: "app"})
	plain := l.up("plain", "")
	l.has("plain", plain)
	within(t, 60*time.Second, "an ADD is refused without the entry", func() error {
		if n := l.refusals(); n <= former+1 { // one ADD may have begun before
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
	l.remove("only", "plain")
	l.allHome()
}
