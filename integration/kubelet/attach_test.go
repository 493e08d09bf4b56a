// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestAttach (V-18): pods have their VFs when their first container starts, numbered as documented, and give them back as they were.
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
	l.put("two", container{name: "web"}, container{"zoo", resources{resource: "2", slow: "1"}, false}, container{"app", resources{resource: "1", slow: "2"}, false})
	two := l.up("two", "")
	want := slices.Concat(l.allocated("two", "zoo", slow), l.allocated("two", "zoo", resource), l.allocated("two", "app", slow), l.allocated("two", "app", resource))
	if len(want) != 6 {
		t.Fatalf("pod two was allocated %v", want)
	}
	l.has("two", two, want...)

	// What an admin does in a pod's namespace does not stay with the VF.
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

// TestInitContainers: a VF that goes from an init container to another is there from the beginning. One that only an init container has is not
// told by the kubelet: the pod is refused, whoever is asked.
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
		t.Errorf("it has the sandbox %+v", s)
	}
	l.remove("both", "only")
	l.allHome()
}
