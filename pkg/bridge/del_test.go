// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

func TestDel(t *testing.T) {
	l := newLab(t)
	for what, keys := range map[string][]any{
		"twice": nil, "without namespace": {"CNI_NETNS", ""}, "with a namespace that is gone": {"CNI_NETNS", "/run/netns/gone"},
		"with a plain file": {"CNI_NETNS", "/proc/self/status"}, "in its own": {"CNI_NETNS", "/proc/self/ns/net"},
		"with a configuration that changed": {"bridge", "other", "ipam", nil, "ipMasq", false, "mtu", 7},
		"with a broken configuration":       {"vlan", "x", "cniVersion", "9.9.9", "prevResult", []any{}},
	} {
		l.add("a")
		for range 2 {
			l.OK(l.Call("DEL", "a", keys...))
		}
		if left := listLeases(t); len(left) > 0 {
			t.Errorf("DEL %s left the leases %v", what, left)
		}
		if err := l.inPod("eth0", func(netlink.Link) error { return nil }); err == nil {
			t.Errorf("DEL %s left eth0", what)
		}
	}
}

// TestDelReadsOwnLeases: DEL has the addresses in its record and reads no other lease. It would log a folder in place of one.
func TestDelReadsOwnLeases(t *testing.T) {
	l := newLab(t)
	l.add("a")
	folder := "/var/lib/cni/networks/" + l.network() + "/10.60.0.99"
	kerneltest.Must(t, os.Mkdir(folder, 0o700))
	t.Cleanup(func() { _ = os.Remove(folder) })
	if log := l.OK(l.Call("DEL", "a")).Log; strings.Contains(log, "10.60.0.99") {
		t.Error(log)
	}
	if log := l.OK(l.Call("DEL", "a")).Log; !strings.Contains(log, "10.60.0.99") {
		t.Errorf("a DEL that knows no address did not read all leases: %s", log)
	}
}

// TestDelOfOther: DEL for a pod that was never attached, but with the namespace and interface name of another one, leaves that one alone.
func TestDelOfOther(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	l.OK(l.Call("DEL", "other", "prevResult",
		object{"cniVersion": "1.1.0", "interfaces": []any{object{"name": "eth0", "mac": "02:00:00:00:00:99", "sandbox": "x"}}}))
	l.OK(l.Call("DEL", "other"))
	l.OK(a.check())
}

// TestDelUnrecorded: without a record, DEL finds the attachment by the name of the host-side veth, the lease and prevResult.
func TestDelUnrecorded(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	a.loseRecord()
	l.OK(l.Call("DEL", "a", "prevResult", a.prev))
	if left := listLeases(t); len(left) > 0 {
		t.Errorf("left the leases %v", left)
	}
}

// TestDelForeignVeth: DEL deletes a veth pair with another plugin's name only if prevResult proves that it belongs to the attachment.
func TestDelForeignVeth(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	a.loseRecord()
	if err := onHost(a.hostVeth(), func(link netlink.Link) error { return netlink.LinkSetName(link, "foreign0") }); err != nil {
		t.Fatal(err)
	}
	l.Fails(a.check(), plugin.CodeStateDiffers, "the host side of eth0 is foreign0, want "+a.hostVeth())
	a.prev = bytes.Replace(a.prev, []byte(a.hostVeth()), []byte("foreign0"), 1)
	l.OK(a.check())
	l.OK(l.Call("DEL", "a", "prevResult", a.prev))
	if err := onHost("foreign0", func(netlink.Link) error { return nil }); err == nil {
		t.Error("the veth pair is left")
	}
}

// TestResidue: the next ADD replaces what a killed ADD left behind.
func TestResidue(t *testing.T) {
	l := newLab(t)
	l.add("a")
	if err := l.inPod("eth0", netlink.LinkDel); err != nil {
		t.Fatal(err)
	}
	a := l.add("a") // the lease and the record still exist
	if len(listLeases(t)) != 2 {
		t.Errorf("leases %v", listLeases(t))
	}
	l.OK(a.check())
}

// TestUnfinished: the next ADD removes the links of a killed ADD, even from another namespace, but no other program's of the same name.
func TestUnfinished(t *testing.T) {
	l := newLab(t)
	l.add("a")
	unfinish(t, l, "a")
	a := l.add("a")
	l.OK(a.check())
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "interface eth0 already exists")
	unfinish(t, l, "a")
	elsewhere := l.other()
	l.OK(elsewhere.add("a").check())
	unfinish(t, l, "a")
	if err := l.Pod.Do(func() error {
		return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}})
	}); err != nil {
		t.Fatal(err)
	}
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "interface eth0 already exists")
	if err := l.inPod("eth0", netlink.LinkDel); err != nil {
		t.Errorf("another program's interface is gone: %v", err)
	}
	if left := listLeases(t); len(left) > 0 {
		t.Errorf("left the leases %v", left)
	}
}
