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

// TestReattach: CHECK reports a deleted bridge, which had pods of two networks, one with isolated ports. The next ADD creates it with its
// previous MAC, and attaches all pods with their previous settings.
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

// TestReattachToAnothers: the next ADD attaches the orphans, with or without a gateway, to a bridge that another program created again and
// set up.
func TestReattachToAnothers(t *testing.T) {
	for name, keys := range map[string][]any{
		"gateway": {}, "no gateway": {"isGateway", nil, "ipMasq", nil}, "layer 2": {"isGateway", nil, "ipMasq", nil, "ipam", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { _ = onHost("btan0", netlink.LinkDel) })
			l := bareLab(t, append(keys, "name", "reattach2", "bridge", "btan0")...) // the leak check would report the other program's bridge
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

// TestReattachAfterKill: the next ADD attaches the orphans if an ADD was killed between creating the bridge and setting it up.
func TestReattachAfterKill(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	former, _ := net.ParseMAC(mac(t, "bt0"))
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	if err := errors.Join(onHost("bt0", netlink.LinkDel), host.AddBridge("bt0", former, 0, true, false)); err != nil {
		t.Fatal(err)
	}
	a.Fails(a.check(), plugin.CodeStateDiffers, "is not a port of bt0")
	l.other().add("c")
	l.OK(a.check())
}

// TestReattachOnlyItsOwn: ADD attaches no link that is on another bridge, another program's, or of an unfinished ADD.
func TestReattachOnlyItsOwn(t *testing.T) {
	l := newLab(t)
	l.other().add("another") // the bridge takes its previous MAC from this pod
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
	if err := onHost(renamed.hostVeth(), func(v netlink.Link) error { return netlink.LinkSetName(v, "taken0") }); err != nil {
		t.Fatal(err)
	}
	unfinish(t, l, "unfinished")
	l.other().add("c")
	for name, want := range map[string]int{moved.hostVeth(): elsewhere0.Attrs().Index, "taken0": 0, unfinished.hostVeth(): 0} {
		if err := onHost(name, func(v netlink.Link) error {
			if got := v.Attrs().MasterIndex; got != want {
				t.Errorf("%s has master %d, want %d", name, got, want)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	if err := onHost("taken0", netlink.LinkDel); err != nil {
		t.Error(err)
	}
}

// unfinish marks an attachment's record as unfinished, as a killed ADD leaves it.
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

// TestNoWaitOnAnothersBridge: ADD does not wait for an operational state, which a bridge that was up before its first port never gets.
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
		if took := time.Since(start); took >= carrierTimeout {
			t.Errorf("ADD of %s took %v", id, took)
		}
	}
}
