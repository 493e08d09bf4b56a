// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

func mac(t *testing.T, name string) (mac string) {
	t.Helper()
	if err := onHost(name, func(l netlink.Link) error { mac = l.Attrs().HardwareAddr.String(); return nil }); err != nil {
		t.Fatal(err)
	}
	return mac
}

// TestReattach: the bridge is deleted beneath pods of two networks, one with isolated ports. CHECK tells; the next ADD makes the bridge
// with its former MAC and attaches all of them again, as they were.
func TestReattach(t *testing.T) {
	l := newLab(t)
	other := l.other()
	other.Conf = l.Conf.With("name", "net2", "hairpinMode", false, "portIsolation", true, "ipMasq", false,
		"ipam", object{"type": "host-local", "subnet": "fd00:62::/64"})
	t.Cleanup(func() {
		if err := onHost("bt0", delAddress("fd00:62::1/64")); err != nil {
			t.Error(err)
		}
	})
	a, b := l.add("a"), other.add("b")
	former := mac(t, "bt0")
	if err := onHost("bt0", netlink.LinkDel); err != nil {
		t.Fatal(err)
	}
	for _, pod := range []attached{a, b} {
		pod.Fails(pod.check(), plugin.CodeStateDiffers, "bridge bt0 is missing")
	}
	c := l.other().add("c")
	for _, pod := range []attached{a, b, c} {
		pod.OK(pod.check())
	}
	if now := mac(t, "bt0"); now != former {
		t.Errorf("the bridge has MAC %s, had %s", now, former)
	}
}

// TestReattachToAnothers: somebody deletes the bridge and makes another, and brings it up. The next ADD attaches the pods, also of a
// network that has no gateway on it.
func TestReattachToAnothers(t *testing.T) {
	for name, keys := range map[string][]any{
		"gateway": {}, "no gateway": {"isGateway", nil, "ipMasq", nil}, "layer 2": {"isGateway", nil, "ipMasq", nil, "ipam", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { _ = onHost("btan0", netlink.LinkDel) })
			l := bareLab(t, append(keys, "name", "anew", "bridge", "btan0")...) // the oracle would see the bridge that is not ours
			a := l.add("a")
			if err := onHost("btan0", netlink.LinkDel); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "btan0"}}),
				onHost("btan0", netlink.LinkSetUp)); err != nil {
				t.Fatal(err)
			}
			a.Fails(a.check(), plugin.CodeStateDiffers, "is not a port of btan0")
			l.other().add("b")
			l.OK(a.check())
		})
	}
}

// TestReattachAfterKill: whoever made the bridge was killed before it brought the bridge up, so the next ADD attaches.
func TestReattachAfterKill(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	former, _ := net.ParseMAC(mac(t, "bt0"))
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	if err := errors.Join(onHost("bt0", netlink.LinkDel), host.AddBridge("bt0", former, 0, true)); err != nil {
		t.Fatal(err)
	}
	a.Fails(a.check(), plugin.CodeStateDiffers, "is not a port of bt0")
	l.other().add("c")
	l.OK(a.check())
}

// TestReattachOnlyItsOwn: a link that has another bridge, that is another's by now, or whose attachment was never finished, stays alone.
func TestReattachOnlyItsOwn(t *testing.T) {
	l := newLab(t)
	l.other().add("another") // from which the bridge takes its former MAC
	moved, renamed, unfinished := l.add("moved"), l.other().add("renamed"), l.other().add("unfinished")
	t.Cleanup(func() { _ = onHost("elsewhere0", netlink.LinkDel) })
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "elsewhere0"}}); err != nil {
		t.Fatal(err)
	}
	if err := onHost("bt0", netlink.LinkDel); err != nil {
		t.Fatal(err)
	}
	elsewhere0, err := netlink.LinkByName("elsewhere0")
	if err != nil {
		t.Fatal(err)
	}
	if err := onHost(moved.hostVeth(), func(v netlink.Link) error { return netlink.LinkSetMaster(v, elsewhere0) }); err != nil {
		t.Fatal(err)
	}
	if err := onHost(renamed.hostVeth(), func(v netlink.Link) error { return netlink.LinkSetName(v, "somebodys0") }); err != nil {
		t.Fatal(err)
	}
	unfinish(t, l, "unfinished")
	l.other().add("c")
	for name, want := range map[string]int{moved.hostVeth(): elsewhere0.Attrs().Index, "somebodys0": 0, unfinished.hostVeth(): 0} {
		if err := onHost(name, func(v netlink.Link) error {
			if got := v.Attrs().MasterIndex; got != want {
				t.Errorf("%s has master %d, want %d", name, got, want)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	if err := onHost("somebodys0", netlink.LinkDel); err != nil {
		t.Error(err)
	}
}

// unfinish makes the record of an attachment what it was a moment before its ADD ended.
func unfinish(t *testing.T, l lab, id string) {
	t.Helper()
	path := filepath.Join(store.Root, l.network(), "bridge-"+key(l.network(), id).Hash())
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const bridge = `"state":{`
	edited := strings.Replace(string(data), bridge, bridge+`"unfinished":true,`, 1)
	if err := os.WriteFile(path, []byte(edited), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestNoWaitOnAnothersBridge: the kernel reports no operational state of a bridge that was up before its first port. No ADD waits for it.
func TestNoWaitOnAnothersBridge(t *testing.T) {
	t.Cleanup(func() { _ = onHost("btup0", netlink.LinkDel) })
	l := bareLab(t, "name", "upbefore", "bridge", "btup0")
	if err := errors.Join(netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "btup0"}}),
		onHost("btup0", netlink.LinkSetUp)); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"a", "b"} {
		start := time.Now()
		l.other().add(id)
		if took := time.Since(start); took > carrierTimeout/2 {
			t.Errorf("ADD of %s took %v", id, took)
		}
	}
}
