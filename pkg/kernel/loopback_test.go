// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestProtectLoopback makes a table of its own.
func TestProtectLoopback(t *testing.T) {
	flush(t)
	h := host(t)
	for range 2 {
		mustDo(t, h.ProtectLoopback())
		if lines := records(t, "nft rule inet "+loopbackTable+" prerouting", "immediate"); len(lines) != 2 {
			t.Errorf("got %q", lines)
		}
	}
}

// TestLoopbackUsers (S-04): route_localnet and the protection go with the last who needs them, link by link, and what somebody else switched
// on stays.
func TestLoopbackUsers(t *testing.T) {
	flush(t)
	h := host(t)
	t.Cleanup(func() { mustDo(t, os.RemoveAll(loopbackUsers)) })
	for _, link := range []string{"kt0", "kt1"} {
		addBridge(t, h, link)
	}
	state := func(want string) {
		t.Helper()
		zero, err := h.Get("ipv4/conf/kt0/route_localnet")
		one, err1 := h.Get("ipv4/conf/kt1/route_localnet")
		if got := fmt.Sprintf("%s %s %d", zero, one, len(records(t, "nft rule inet "+loopbackTable, "immediate"))); got != want || err != nil || err1 != nil {
			t.Errorf("got %s, want %s; %v %v", got, want, err, err1)
		}
	}
	a, b := strings.Fields(ownerA)[0], strings.Fields(ownerB)[0]
	state("0 0 0")
	mustDo(t, h.OpenLoopback(a, "kt0"), h.OpenLoopback(a, "kt0"), h.OpenLoopback(b, "kt0"), h.OpenLoopback(b, "kt1"))
	state("1 1 2")
	closeFor := func(owner, link string) error { return h.DelHostPorts(HostPorts{Owner: owner, Localhost: link}) }
	mustDo(t, closeFor(ownerA, "kt1"), delPorts(h, ownerA, nil))
	state("1 1 2")
	_, err := h.DelOwnedHostPorts(ownerB)
	mustDo(t, err)
	state("1 0 2")
	mustDo(t, closeFor(ownerB, "kt0"))
	state("1 0 2")
	mustDo(t, closeFor(ownerA, "kt0"))
	state("0 0 0")
	if _, err := os.Stat(loopbackUsers); err == nil {
		if left, _ := names(loopbackUsers, -1); len(left) > 0 {
			t.Errorf("left %q", left)
		}
	}
	mustDo(t, h.Set(Sysctl{"ipv4/conf/kt1/route_localnet", "1"}), h.OpenLoopback(a, "kt1"), h.OpenLoopback(b, "kt1"), closeFor(ownerA, "kt1"))
	state("0 1 2")
	mustDo(t, closeFor(ownerB, "kt1"))
	state("0 1 0")
	// What a lost record left of the protection goes with the ports.
	mustDo(t, h.ProtectLoopback(), closeFor(ownerB, "kt1"))
	state("0 1 0")
	if left, _ := names(loopbackUsers, -1); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}
