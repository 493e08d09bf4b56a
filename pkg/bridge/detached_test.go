// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func (l lab) hostHandle() *kernel.Node {
	l.Helper()
	host, err := kernel.Host()
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(host.Close)
	return host
}

// detached returns the ports that DetachedPorts finds, without their records.
func (l lab) detached(host *kernel.Node) []DetachedPort {
	l.Helper()
	found, err := DetachedPorts(host)
	if err != nil {
		l.Fatal(err)
	}
	for i := range found {
		found[i].Record = attachment.Record{}
	}
	return found
}

// TestDetachedPort: DetachedPorts finds a port that was removed from the bridge, and Restore attaches it with its flags and VLANs.
func TestDetachedPort(t *testing.T) {
	kerneltest.Slow(t)
	for name, keys := range map[string][]any{
		"plain":    {"hairpinMode", false},
		"hairpin":  {"hairpinMode", true},
		"guarded":  {"hairpinMode", false, "antiSpoof", true, "portIsolation", true},
		"layer 2":  {"isGateway", nil, "ipMasq", nil, "ipam", nil},
		"VLAN":     {"vlan", 7, "ipMasq", false},
		"no guard": {"hairpinMode", false, "antiSpoof", false, "ipMasq", false},
	} {
		t.Run(name, func(t *testing.T) {
			l := bareLab(t, append([]any{"name", "detached", "bridge", "btdet"}, keys...)...)
			if o := l.Call("STATUS", ""); name == "VLAN" && o.Exit != 0 {
				t.Skip("SKIPPED: the kernel has no VLAN filtering")
			}
			t.Cleanup(func() { _ = onHost("btdet", netlink.LinkDel) })
			a, b := l.add("a"), l.other().add("b")
			host := l.hostHandle()
			if found := l.detached(host); len(found) > 0 {
				t.Errorf("before: %+v", found)
			}
			l.run("ip link set dev " + a.hostVeth() + " nomaster")
			want := []DetachedPort{{Interface: a.hostVeth(), Bridge: "btdet"}}
			if diff := cmp.Diff(want, l.detached(host)); diff != "" {
				t.Error(diff)
			}
			l.Fails(a.check(), plugin.CodeStateDiffers, "is not a port of btdet")
			if err := Restore(host, slog.New(slog.DiscardHandler), attachment.Waiting); err != nil {
				t.Fatal(err)
			}
			for _, pod := range []attached{a, b} {
				l.OK(pod.check())
			}
			if found := l.detached(host); len(found) > 0 {
				t.Errorf("after: %+v", found)
			}
		})
	}
}

// TestDetachedElsewhere: Restore leaves a port that another program moved to another bridge, and attaches it if the pod's bridge was
// deleted, which Restore creates again, or is down, which it sets up. A deleted port is reported.
func TestDetachedElsewhere(t *testing.T) {
	l := bareLab(t, "name", "elsewhere", "bridge", "btels", "isGateway", false, "ipMasq", false)
	t.Cleanup(func() { _ = onHost("btels", netlink.LinkDel); _ = onHost("btother", netlink.LinkDel) })
	a := l.add("moved")
	port, host := a.hostVeth(), l.hostHandle()
	for _, c := range []struct {
		command string
		want    []DetachedPort
	}{
		{"ip link add btother type bridge; ip link set dev " + port + " master btother",
			[]DetachedPort{{Interface: port, Bridge: "btels", Master: "btother"}}},
		{"ip link del btother; ip link del btels", nil},
		{"ip link set btels down", nil},
		{"ip link del btels; ip link add btels type bridge; ip link set btels up", nil},
	} {
		l.run(c.command)
		if err := Restore(host, slog.New(slog.DiscardHandler), attachment.Waiting); err != nil {
			t.Errorf("%s: %v", c.command, err)
		}
		if diff := cmp.Diff(c.want, l.detached(host)); diff != "" {
			t.Errorf("%s: %s", c.command, diff)
		}
	}
	l.OK(a.check())
	l.run("ip link del " + port)
	if diff := cmp.Diff([]DetachedPort{{Interface: port, Bridge: "btels", Deleted: true}}, l.detached(host)); diff != "" {
		t.Error(diff)
	}
}

// TestRestoreKeepsVLANsApart: the host-side veth of a pod with a VLAN is not attached to a bridge without VLAN filtering.
func TestRestoreKeepsVLANsApart(t *testing.T) {
	err := restorePort(nil, kernel.Link{Name: "btmix", Kind: "bridge"}, kernel.Link{Name: "port0"}, state{VLANs: VLANs{ID: 7}})
	if plugin.Code(err) != plugin.CodeDevice {
		t.Errorf("got %v", err)
	}
}

// TestRestoreShared: Restore creates the bridge of two networks as it was, and attaches VLANs' gateways again. A bridge that another
// program created stays as it is.
func TestRestoreShared(t *testing.T) {
	for name, keys := range map[string][]any{"plain": nil, "VLAN": {"vlan", 100, "ipMasq", false}} {
		t.Run(name, func(t *testing.T) {
			l := bareLab(t, append([]any{"name", "zzb", "bridge", "btshared", "ipam", object{"type": "host-local", "subnet": "10.97.0.0/24"}},
				keys...)...)
			if o := l.Call("STATUS", ""); name == "VLAN" && o.Exit != 0 {
				t.Skip("SKIPPED: the kernel has no VLAN filtering")
			}
			t.Cleanup(func() { _ = onHost("btshared", netlink.LinkDel); _ = onHost("btshared.100", netlink.LinkDel) })
			layer2 := l.other()
			layer2.Conf = l.Conf.With("name", "zza", "isGateway", false, "ipMasq", false, "vlan", nil, "ipam", object{})
			b, a := l.add("b"), layer2.add("a")
			host := l.hostHandle()
			look := func() string {
				return l.run(`ip -d -o link show btshared | sed 's/^[0-9]*//; s/[a-z]*_timer *[^ ]*//g; s/fdb_n_learned [0-9]*//'
					sysctl net.ipv6.conf.btshared.accept_ra net.ipv6.conf.btshared.accept_dad`)
			}
			want := look()
			l.run("ip link del btshared")
			if err := Restore(host, slog.New(slog.DiscardHandler), attachment.Waiting); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, look()); diff != "" {
				t.Error(diff)
			}
			l.OK(a.check())
			l.OK(b.check())
			if name == "VLAN" {
				return
			}
			l.run("ip link del btshared; ip link add btshared type bridge")
			if err := Restore(host, slog.New(slog.DiscardHandler), attachment.Waiting); err != nil {
				t.Fatal(err)
			}
			if got := look(); strings.Contains(got, ",UP") || !strings.Contains(got, "accept_ra = 1") {
				t.Errorf("another program's bridge: %s", got)
			}
		})
	}
}
