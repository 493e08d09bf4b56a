// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// TestAttach: pods have their VFs when their first container starts, numbered as documented, and give them back as they were.
func TestAttach(t *testing.T) {
	l := newVFLab(t)
	l.put("none", container{"app", nil})
	l.has("none", l.up("none", ""))
	if records, _ := filepath.Glob("/run/podlace/*/sriov-*"); len(records) > 0 || len(journals(t)) > 0 {
		t.Errorf("a pod without VF has left %v, %v", records, journals(t))
	}
	l.put("one", container{"app", vfs(1)})
	one := l.up("one", "")
	l.has("one", one, l.allocated("one", "app", resource)...)
	l.put("two", container{"web", nil}, container{"zoo", resources{resource: "2", slow: "1"}}, container{"app", resources{resource: "1", slow: "2"}})
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
