// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestDelGoesOn: if the IPAM plugin cannot release the addresses, DEL removes the interface, but keeps the record for a retry.
func TestDelGoesOn(t *testing.T) {
	l := newLab(t)
	f := &fakeIPAM{answer: `"ips":[{"address":"10.60.0.9/24"},{"address":"fd00:60::9/64"}]`, delErr: errors.New("later")}
	l.Plugin, l.Conf = Plugin(f.plugin(t)).Run, l.Conf.With("ipam", object{"type": "fake"})
	l.OK(l.Call("ADD", "a"))
	l.Fails(l.Call("DEL", "a"), plugin.CodeIO, "ipam fake: later")
	if err := l.inPod("eth0", func(netlink.Link) error { return nil }); err == nil {
		t.Error("the interface is left")
	}
	f.delErr = nil
	l.OK(l.Call("DEL", "a", "ipam", nil))
	if f.given != 2 {
		t.Errorf("the addresses were given back %d times", f.given)
	}
}

// TestIPAMGone: DEL calls the currently configured IPAM plugin if the pod's was uninstalled or the record was damaged.
func TestIPAMGone(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	list, _, err := attachment.Scan()
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	data, err := os.ReadFile(list[0].Path())
	if err == nil {
		err = os.WriteFile(list[0].Path(), bytes.ReplaceAll(data, []byte(`"host-local"`), []byte(`"missing"`)), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	gone := "ipam missing: no such plugin in CNI_PATH"
	l.Fails(l.Call("DEL", "a", "ipam", object{"type": "missing"}), plugin.CodeConfig, gone)
	l.Fails(l.Call("DEL", "a", "ipam", nil), plugin.CodeConfig, gone)
	l.OK(l.Call("DEL", "a"))
	if left := listLeases(t); len(left) > 0 {
		t.Errorf("leases %q", left)
	}
}

func TestIPAMMissing(t *testing.T) {
	l := newLab(t)
	l.Fails(l.Call("ADD", "a", "ipam", object{"type": "missing"}), plugin.CodeConfig, "ipam missing: no such plugin in CNI_PATH")
}
