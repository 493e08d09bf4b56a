// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

func key(network, id string) attachment.Key {
	return attachment.Key{Network: network, ContainerID: id, IfName: "eth0"}
}

// TestGC: what is not valid goes as by DEL, what is valid stays.
func TestGC(t *testing.T) {
	l := newLab(t)
	kept := l.add("kept")
	gone := l
	gone.pod = kerneltest.NewPod(t)
	gone.add("gone")
	valid := []any{object{"containerID": "kept", "ifname": "eth0"}, object{"containerID": "gone", "ifname": "net1"}}
	for range 2 {
		l.ok(l.call("GC", "", "cni.dev/valid-attachments", valid))
		l.ok(kept.check())
		if len(leases(t)) != 2 {
			t.Errorf("left the leases %v", leases(t))
		}
		if err := gone.inPod("eth0", func(netlink.Link) error { return nil }); err == nil {
			t.Error("the pod still has its interface")
		}
	}
}

// fakeIPAM is an IPAM plugin that runs in process and fails as it is told.
type fakeIPAM struct {
	answer         string
	addErr, delErr error
	added, given   int
}

func (f *fakeIPAM) plugin(t *testing.T) plugin.Plugin {
	return plugin.Plugin{Name: "fake",
		Add: func(*plugin.Request) (*types100.Result, error) {
			if f.added++; f.addErr != nil {
				return nil, f.addErr
			}
			return ipamResult(t, f.answer), nil
		},
		Del: func(*plugin.Request) error { f.given++; return f.delErr },
	}
}

// TestIPAMFails: the pod is as before, and the code of the IPAM plugin arrives.
func TestIPAMFails(t *testing.T) {
	for what, f := range map[string]*fakeIPAM{
		"fails":            {addErr: plugin.Errorf(plugin.CodeExhausted, "full")},
		"has bad gateways": {answer: `"ips":[{"address":"10.60.0.9/24","gateway":"fd00::1"}]`},
		"has bad routes":   {answer: `"ips":[{"address":"10.60.0.9/24"}],"routes":[{"dst":"192.0.2.0/24","gw":"203.0.113.7"}]`},
	} {
		l := newLab(t)
		l.plugin = Plugin(f.plugin(t))
		o := l.call("ADD", "a", "ipam", object{"type": "fake"})
		given := 1
		if f.addErr != nil {
			given = 0 // it has nothing
		}
		if o.exit != 1 || f.added != 1 || f.given != given {
			t.Errorf("%s: exit %d, %d ADD, %d DEL: %s", what, o.exit, f.added, f.given, o.stdout)
		}
		if f.addErr != nil {
			l.fails(o, plugin.CodeExhausted, "bridge add: ipam fake: full")
		}
	}
}

// TestDelGoesOn: an IPAM plugin that cannot give back keeps neither the interface nor the record from a second try.
func TestDelGoesOn(t *testing.T) {
	l := newLab(t)
	f := &fakeIPAM{answer: `"ips":[{"address":"10.60.0.9/24"},{"address":"fd00:60::9/64"}]`, delErr: errors.New("later")}
	l.plugin, l.conf = Plugin(f.plugin(t)), l.conf.with("ipam", object{"type": "fake"})
	l.ok(l.call("ADD", "a"))
	l.fails(l.call("DEL", "a"), plugin.CodeIO, "ipam fake: later")
	if err := l.inPod("eth0", func(netlink.Link) error { return nil }); err == nil {
		t.Error("the interface is left")
	}
	f.delErr = nil
	l.ok(l.call("DEL", "a", "ipam", nil))
	if f.given != 2 {
		t.Errorf("the addresses were given back %d times", f.given)
	}
}

func TestIPAMMissing(t *testing.T) {
	l := newLab(t)
	l.fails(l.call("ADD", "a", "ipam", object{"type": "missing"}), plugin.CodeConfig, "ipam missing: no such plugin in CNI_PATH")
}
