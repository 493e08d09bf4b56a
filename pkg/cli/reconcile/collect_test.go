// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestCollectWithoutSocket: Collect calls no GC, which would release addresses, while it cannot know which attachments to keep.
func TestCollectWithoutSocket(t *testing.T) {
	dir := t.TempDir()
	script(t, filepath.Join(dir, "host-local"), `echo "CNI plugin of Podlace x" >&2`)
	plan := Plan{Network: Network{Name: "n"}, Run: []Plugin{{Type: hostLocal, raw: json.RawMessage(`{}`)}}, binDir: dir}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	err := plan.Collect([]*Attachment{{Network: "n", ContainerID: "b", IfName: "eth0", Dead: "yes"}})
	if e := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); e != nil {
		t.Fatal(e)
	}
	if err == nil || !strings.Contains(err.Error(), "open netlink socket") || strings.Contains(err.Error(), "network n: host-local") {
		t.Error(err)
	}
}
