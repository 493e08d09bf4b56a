// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// harshDels returns unusual DEL calls that a runtime may send after a successful ADD.
func harshDels(t *testing.T) map[string]func(harness.Call) harness.Call {
	t.Helper()
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	other := object{"cniVersion": "0.4.0", "ips": []any{object{"version": "4", "address": "10.99.0.2/24"}}}
	return map[string]func(harness.Call) harness.Call{
		"C-45 DEL without prevResult":               editedKeys("prevResult", nil),
		"C-45 DEL with an empty prevResult":         editedKeys("prevResult", object{}),
		"C-45 DEL with prevResult of another":       editedKeys("prevResult", other),
		"C-45 DEL with prevResult of no version":    editedKeys("prevResult", other.With("cniVersion", nil)),
		"C-45 DEL with prevResult of version 9.9.9": editedKeys("prevResult", other.With("cniVersion", "9.9.9")),
		"C-45 DEL with a list as prevResult":        editedKeys("prevResult", []any{1}),
		"C-45 DEL with a word as prevResult":        editedKeys("prevResult", "x"),
		"C-45 DEL with null in prevResult": editedKeys("prevResult",
			object{"cniVersion": "1.1.0", "interfaces": []any{nil}, "ips": []any{nil}}),
		"C-45 DEL with a bad address in prevResult": editedKeys("prevResult",
			object{"cniVersion": "1.1.0", "ips": []any{object{"address": "x"}}}),
		"C-46 DEL without netns":                inNamespace(""),
		"C-46 DEL with netns that is not there": inNamespace("/run/netns/gone"),
		"C-46 DEL with a plain file as netns":   inNamespace(plain),
		"C-46 DEL with a mount namespace":       inNamespace("/proc/self/ns/mnt"),
		"C-47 DEL without runtimeConfig":        editedKeys("runtimeConfig", nil),
		"C-48 DEL with refused runtimeConfig": editedKeys("runtimeConfig",
			object{"mac": "zz", "ips": []any{"x"}, "ipRanges": []any{[]any{object{"subnet": "x"}}},
				"portMappings": harness.Ports(harness.Port(-1, 80, "tcp")), "bandwidth": object{"ingressRate": -1, "egressBurst": 1}}),
	}
}

// TestDelHarsh runs each DEL of harshDels on each plugin, and on the chain with both backends.
func TestDelHarsh(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for title, edit := range harness.InOrder(harshDels(t)) {
			t.Run(title, func(t *testing.T) {
				f.Life(t, plugin, func() {
					f.Good("ADD", plugin).Run(t).OK(t)
					edit(f.Good("DEL", plugin)).Run(t).OK(t)
					if plugin == "loopback" { // without the namespace, loopback cannot find lo; lo disappears with the namespace
						f.Good("DEL", plugin).Run(t).OK(t)
					}
				})
				f.Oracle.Clean(t, title)
			})
		}
	})
	for subnet, backend := range []string{"nftables", "iptables"} {
		t.Run("chain-"+backend, func(t *testing.T) {
			n := newNode(t, "harsh-"+backend[:3], 100+subnet, backend)
			before := harness.Watch(t)
			for title, edit := range harness.InOrder(harshDels(t)) {
				t.Run(title, func(t *testing.T) {
					n := n.inSubtest(t)
					n.attach("harsh").delChain(edit)
					before.Clean(t, title)
				})
			}
			n.delMore(before)
		})
	}
}

// delMore tests unusual DELs that need more preparation than an edited call.
func (n testNode) delMore(before *harness.Oracle) {
	n.Run("C-46 DEL after the namespace went", func(t *testing.T) {
		n := n.inSubtest(t)
		h := n.attach("vanished")
		if err := h.pod.Close(); err != nil {
			t.Fatal(err)
		}
		h.delChain(editedKeys("prevResult", nil))
		before.Clean(t, "DEL")
	})
	n.Run("C-49 DEL three times", func(t *testing.T) {
		n := n.inSubtest(t)
		stays := n.withKeys(1, "runtimeConfig", nil).attach("stays")
		with := harness.Watch(t, stays.pod)
		h := n.attach("thrice")
		for range 3 {
			h.delChain()
			with.Clean(t, "DEL")
		}
		stays.checkChain()
		stays.delChain()
		before.Clean(t, "DEL of the other")
	})
	n.Run("C-48 DEL after ADD refused the runtimeConfig", func(t *testing.T) {
		n := n.inSubtest(t)
		h := n.attach("refused")
		with := harness.Watch(t, h.pod)
		second := attachedPod{testNode: n.withKeys(1, "runtimeConfig.portMappings", harness.Ports(harness.Port(-1, 80, "tcp"))).withKeys(2,
			"runtimeConfig.bandwidth", object{"ingressRate": -1}),
			pod: harness.NewPod(t, "refused-2"), ifname: "eth0", prev: h.prev}
		for i := 1; i < 3; i++ {
			second.callOf(i, "ADD").Run(t).Refused(t, harness.CodeConfig)
		}
		second.delChain()
		with.Clean(t, "DEL")
		h.delChain()
		before.Clean(t, "DEL of the other")
	})
}

// TestDelRanges: DEL works without address ranges, even if ADD got the ranges in its runtimeConfig.
func TestDelRanges(t *testing.T) {
	f := harness.NewFixture(t, "host-local")
	t.Run("C-47 DEL without the ranges of runtimeConfig", func(t *testing.T) {
		conf := f.Conf("host-local").With("ipam.ranges", nil, "runtimeConfig.ipRanges", []any{[]any{object{"subnet": "10.70.0.0/24"}}})
		f.Good("ADD", "host-local").Config(conf).Run(t).OK(t)
		f.Good("DEL", "host-local").Config(conf.With("runtimeConfig", nil)).Run(t).OK(t)
		f.Oracle.Clean(t, "DEL")
	})
}

// TestDelOwn: DEL of one of a pod's three attachments, two of which are in the same network, leaves the others alone, with each backend.
func TestDelOwn(t *testing.T) {
	for i, backend := range []string{"nftables", "iptables"} {
		t.Run("C-50 DEL of one interface of three/"+backend, func(t *testing.T) {
			a, b := newNode(t, "own-a-"+backend[:3], 110+2*i, backend), newNode(t, "own-b-"+backend[:3], 111+2*i, backend)
			pod := harness.NewPod(t, "own")
			none := harness.Watch(t, pod)
			first := a.attachTo(pod, "eth0")
			one := harness.Watch(t, pod)
			second := b.withKeys(0, "isDefaultGateway", false).attachTo(pod, "eth1")
			two := harness.Watch(t, pod)
			ports := harness.Ports(harness.Port(8103, 80, "tcp"))
			third := a.withKeys(0, "isDefaultGateway", false).withKeys(1, "runtimeConfig.portMappings", ports).attachTo(pod, "eth2")
			third.delChain()
			two.Clean(t, "DEL of the third")
			first.checkChain()
			second.checkChain()
			second.delChain()
			one.Clean(t, "DEL of the second")
			first.checkChain()
			first.delChain()
			none.Clean(t, "DEL of the first")
		})
	}
}

// TestDelUnknown: DEL of an unknown container changes nothing, not even state that other tests ignore, such as lock files.
func TestDelUnknown(t *testing.T) {
	n := newNode(t, "unknown", 120, "nftables")
	h := n.attach("10.120.0.9") // the ID of this pod looks like an address that the pod does not have
	o := &harness.Oracle{Options: snapshot.Options{Pods: []*sandbox.Pod{h.pod}, Dirs: harness.StateDirs()}}
	o.Rebase(t)
	ids := []string{"10.120.0.2", "10.120.0.3", "10.120.0.1", "last_reserved_ip.0", "last_reserved_ip.1", "lock", "mark", "released", "x",
		"unknown", "unknown-first"}
	for _, file := range []string{"/run/podlace/unknown/*", "/var/lib/cni/networks/unknown/*"} {
		paths, err := filepath.Glob(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			ids = append(ids, filepath.Base(p))
		}
	}
	for _, id := range ids {
		t.Run("C-52 DEL of the unknown container "+id, func(t *testing.T) {
			for _, plugin := range harness.AllPlugins() {
				c := harness.NewCall("DEL", plugin, nil, id, n.confs[0])
				if i := map[string]int{"portmap": 1, "bandwidth": 2}[plugin]; i > 0 {
					c = c.Config(n.confs[i])
				}
				for _, ifname := range []string{"eth0", "eth1"} {
					o := c.With("CNI_IFNAME", ifname).Run(t)
					if strings.HasPrefix(id, ".") || strings.Contains(id, ":") { // not a valid container ID
						o.Refused(t, harness.CodeEnv)
						continue
					}
					o.OK(t)
				}
			}
			o.Clean(t, "DEL")
		})
	}
	h.checkChain()
	h.delChain()
}

// makeReadOnly makes a folder read-only until the returned function is called.
func makeReadOnly(t *testing.T, dir string) (again func()) {
	t.Helper()
	err := errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	if err != nil {
		t.Fatal(err)
	}
	again = sync.OnceFunc(func() { _ = unix.Unmount(dir, 0) })
	t.Cleanup(again)
	return again
}

// TestDelReadOnly: DEL reports what it cannot remove from a read-only folder. The next DEL removes it once the folder is writable.
func TestDelReadOnly(t *testing.T) {
	n := newNode(t, "readonly", 121, "nftables")
	before := harness.Watch(t)
	for i, c := range []struct{ plugin, dir string }{
		{"bridge", "/var/lib/cni/networks/readonly"}, {"host-local", "/var/lib/cni/networks/readonly"}, {"bridge", "/run/podlace/readonly"},
		{"portmap", "/run/podlace/readonly"},
	} {
		t.Run("C-51 DEL of "+c.plugin+" with read-only "+strings.Split(c.dir, "/")[1], func(t *testing.T) {
			n := n.inSubtest(t)
			h := n.attach(fmt.Sprint("readonly", i))
			del := h.callOf(map[string]int{"portmap": 1}[c.plugin], "DEL")
			del.Plugin = c.plugin
			again := makeReadOnly(t, c.dir)
			del.Run(t).Refused(t, 5)
			again()
			h.delChain()
			before.Clean(t, "the next DEL")
		})
	}
}

// TestDelBusy: if DEL cannot delete a lease in a writable folder, DEL reports this lease.
func TestDelBusy(t *testing.T) {
	n := newNode(t, "undeletable", 122, "nftables")
	before := harness.Watch(t)
	for _, plugin := range []string{"bridge", "host-local"} {
		t.Run("C-51 DEL of "+plugin+" with a lease that cannot be deleted", func(t *testing.T) {
			n := n.inSubtest(t)
			h := n.attach("undeletable")
			lease := "/var/lib/cni/networks/undeletable/" + h.result.IPs[1].Address.IP.String()
			if err := unix.Mount(lease, lease, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			del := h.callOf(0, "DEL")
			del.Plugin = plugin
			o := del.Run(t)
			if err := unix.Unmount(lease, 0); err != nil {
				t.Fatal(err)
			}
			o.Refused(t, 11)
			h.delChain()
			before.Clean(t, "the next DEL")
		})
	}
}

// TestDelTexts: some runtimes take a failed DEL for a success if its text contains certain phrases, which Refused looks for.
func TestDelTexts(t *testing.T) {
	s := newStub(t)
	s.call("ADD").Run(t).OK(t)
	const gone = `{"cniVersion":"1.1.0","code":5,"msg":"lease not found: open x: no such file or directory","details":"not found\nno such file"}`
	for title, c := range harness.InOrder(map[string]harness.Call{
		"C-53 the IPAM plugin is missing":           s.call("DEL").With("CNI_PATH", harness.BinDir()),
		"C-53 CNI_PATH is missing":                  s.call("DEL").With("CNI_PATH", ""),
		"C-53 the IPAM plugin says not found":       s.call("DEL").With("SAY", gone),
		"C-53 the IPAM plugin says nothing":         s.call("DEL").With("SAY", " "),
		"C-53 the IPAM plugin says no JSON":         s.call("DEL").With("SAY", "not found"),
		"C-53 the configuration is cut off":         s.call("DEL").Config(`{"name": "not found`),
		"C-53 the name of the network is not found": s.call("DEL").Config(`{"name": "not found"}`),
	}) {
		t.Run(title, func(t *testing.T) {
			s.setScript(t, "DEL", `[ -z "$SAY" ] || { printf %s "$SAY"; exit 1; }`)
			c.Run(t).Refused(t, append(allCodes(), harness.CodeEnv)...)
		})
	}
	s.call("DEL").Run(t).OK(t)
	s.f.Oracle.Clean(t, "DEL")
}
