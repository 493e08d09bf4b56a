// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/sandbox"
)

// harshDels are calls of DEL that a runtime may make after a good ADD.
func harshDels(t *testing.T) map[string]func(call) call {
	t.Helper()
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	other := object{"cniVersion": "0.4.0", "ips": []any{object{"version": "4", "address": "10.99.0.2/24"}}}
	return map[string]func(call) call{
		"C-45 DEL without prevResult":               edited("prevResult", nil),
		"C-45 DEL with an empty prevResult":         edited("prevResult", object{}),
		"C-45 DEL with prevResult of another":       edited("prevResult", other),
		"C-45 DEL with prevResult of no version":    edited("prevResult", other.with("cniVersion", nil)),
		"C-45 DEL with prevResult of version 9.9.9": edited("prevResult", other.with("cniVersion", "9.9.9")),
		"C-45 DEL with a list as prevResult":        edited("prevResult", []any{1}),
		"C-45 DEL with a word as prevResult":        edited("prevResult", "x"),
		"C-45 DEL with null in prevResult":          edited("prevResult", object{"cniVersion": "1.1.0", "interfaces": []any{nil}, "ips": []any{nil}}),
		"C-45 DEL with a bad address in prevResult": edited("prevResult", object{"cniVersion": "1.1.0", "ips": []any{object{"address": "x"}}}),
		"C-46 DEL without netns":                    inNamespace(""),
		"C-46 DEL with netns that is not there":     inNamespace("/run/netns/gone"),
		"C-46 DEL with a plain file as netns":       inNamespace(plain),
		"C-46 DEL with a mount namespace":           inNamespace("/proc/self/ns/mnt"),
		"C-47 DEL without runtimeConfig":            edited("runtimeConfig", nil),
		"C-48 DEL with refused runtimeConfig": edited("runtimeConfig", object{"mac": "zz", "ips": []any{"x"}, "ipRanges": []any{[]any{object{"subnet": "x"}}},
			"portMappings": ports(port(-1, 80, "tcp")), "bandwidth": object{"ingressRate": -1, "egressBurst": 1}}),
	}
}

// TestDelHarsh runs each of them on each plugin, and on the chain with both backends.
func TestDelHarsh(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for title, edit := range inOrder(harshDels(t)) {
			t.Run(title, func(t *testing.T) {
				f.life(t, plugin, func() {
					f.good("ADD", plugin).run(t).ok(t)
					edit(f.good("DEL", plugin)).run(t).ok(t)
					if plugin == "loopback" { // cannot reach lo without the namespace, in which it ends
						f.good("DEL", plugin).run(t).ok(t)
					}
				})
				f.oracle.clean(t, title)
			})
		}
	})
	for subnet, backend := range []string{"nftables", "iptables"} {
		t.Run("chain-"+backend, func(t *testing.T) {
			n := newNode(t, "harsh-"+backend[:3], 100+subnet, backend)
			before := watch(t)
			for title, edit := range inOrder(harshDels(t)) {
				t.Run(title, func(t *testing.T) {
					n := n.in(t)
					n.attach("harsh").del(edit)
					before.clean(t, title)
				})
			}
			n.delMore(before)
		})
	}
}

// delMore are cases that are more than one edited DEL.
func (n node) delMore(before *oracle) {
	n.Run("C-46 DEL after the namespace went", func(t *testing.T) {
		n := n.in(t)
		h := n.attach("vanished")
		if err := h.pod.Close(); err != nil {
			t.Fatal(err)
		}
		h.del(edited("prevResult", nil))
		before.clean(t, "DEL")
	})
	n.Run("C-49 DEL three times", func(t *testing.T) {
		n := n.in(t)
		stays := n.with(1, "runtimeConfig", nil).attach("stays")
		with := watch(t, stays.pod)
		h := n.attach("thrice")
		for range 3 {
			h.del()
			with.clean(t, "DEL")
		}
		stays.check()
		stays.del()
		before.clean(t, "DEL of the other")
	})
	n.Run("C-48 DEL after ADD refused the runtimeConfig", func(t *testing.T) {
		n := n.in(t)
		h := n.attach("refused")
		with := watch(t, h.pod)
		second := held{node: n.with(1, "runtimeConfig.portMappings", ports(port(-1, 80, "tcp"))).with(2, "runtimeConfig.bandwidth", object{"ingressRate": -1}),
			pod: newPod(t, "refused-2"), ifname: "eth0", prev: h.prev}
		for i := 1; i < 3; i++ {
			second.call(i, "ADD").run(t).refused(t, codeConfig)
		}
		second.del()
		with.clean(t, "DEL")
		h.del()
		before.clean(t, "DEL of the other")
	})
}

// TestDelRanges: the ranges may be the runtime's alone.
func TestDelRanges(t *testing.T) {
	f := newFixture(t, "host-local")
	t.Run("C-47 DEL without the ranges of runtimeConfig", func(t *testing.T) {
		conf := f.conf("host-local").with("ipam.ranges", nil, "runtimeConfig.ipRanges", []any{[]any{object{"subnet": "10.70.0.0/24"}}})
		f.good("ADD", "host-local").config(conf).run(t).ok(t)
		f.good("DEL", "host-local").config(conf.with("runtimeConfig", nil)).run(t).ok(t)
		f.oracle.clean(t, "DEL")
	})
}

// TestDelOwn attaches one pod to two networks, and twice to one, with either backend.
func TestDelOwn(t *testing.T) {
	for i, backend := range []string{"nftables", "iptables"} {
		t.Run("C-50 DEL of one interface of three/"+backend, func(t *testing.T) {
			a, b := newNode(t, "own-a-"+backend[:3], 110+2*i, backend), newNode(t, "own-b-"+backend[:3], 111+2*i, backend)
			pod := newPod(t, "own")
			none := watch(t, pod)
			first := a.attachTo(pod, "eth0")
			one := watch(t, pod)
			second := b.with(0, "isDefaultGateway", false).attachTo(pod, "eth1")
			two := watch(t, pod)
			third := a.with(0, "isDefaultGateway", false).with(1, "runtimeConfig.portMappings", ports(port(8103, 80, "tcp"))).attachTo(pod, "eth2")
			third.del()
			two.clean(t, "DEL of the third")
			first.check()
			second.check()
			second.del()
			one.clean(t, "DEL of the second")
			first.check()
			first.del()
			none.clean(t, "DEL of the first")
		})
	}
}

// TestDelUnknown: nothing changes, not even what the oracle of other tests does not look at.
func TestDelUnknown(t *testing.T) {
	n := newNode(t, "unknown", 120, "nftables")
	h := n.attach("10.120.0.9") // whose ID looks like an address that it does not have
	o := &oracle{options: sandbox.Options{Pods: []*sandbox.Pod{h.pod}, Dirs: stateDirs()}}
	o.rebase(t)
	ids := []string{"10.120.0.2", "10.120.0.3", "10.120.0.1", "last_reserved_ip.0", "last_reserved_ip.1", "lock", "mark", "released", "x", "unknown", "unknown-first"}
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
			for _, plugin := range allPlugins() {
				c := newCall("DEL", plugin, nil, id, n.confs[0])
				if i := map[string]int{"portmap": 1, "bandwidth": 2}[plugin]; i > 0 {
					c = c.config(n.confs[i])
				}
				for _, ifname := range []string{"eth0", "eth1"} {
					o := c.with("CNI_IFNAME", ifname).run(t)
					if strings.HasPrefix(id, ".") || strings.Contains(id, ":") { // no container may be called so
						o.refused(t, codeEnv)
						continue
					}
					o.ok(t)
				}
			}
			o.clean(t, "DEL")
		})
	}
	h.check()
	h.del()
}

// readOnly makes a folder read-only until the function that it returns is called.
func readOnly(t *testing.T, dir string) (again func()) {
	t.Helper()
	err := errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	if err != nil {
		t.Fatal(err)
	}
	again = sync.OnceFunc(func() { _ = unix.Unmount(dir, 0) })
	t.Cleanup(again)
	return again
}

// TestDelReadOnly: what cannot be removed is told, and the next DEL removes it.
func TestDelReadOnly(t *testing.T) {
	n := newNode(t, "readonly", 121, "nftables")
	before := watch(t)
	for i, c := range []struct{ plugin, dir string }{
		{"bridge", "/var/lib/cni/networks/readonly"}, {"host-local", "/var/lib/cni/networks/readonly"}, {"bridge", "/run/podlace/readonly"}, {"portmap", "/run/podlace/readonly"},
	} {
		t.Run("C-51 DEL of "+c.plugin+" with read-only "+strings.Split(c.dir, "/")[1], func(t *testing.T) {
			n := n.in(t)
			h := n.attach(fmt.Sprint("readonly", i))
			del := h.call(map[string]int{"portmap": 1}[c.plugin], "DEL")
			del.plugin = c.plugin
			again := readOnly(t, c.dir)
			del.run(t).refused(t, 5)
			again()
			h.del()
			before.clean(t, "the next DEL")
		})
	}
}

// TestDelBusy: a lease that cannot be deleted although its folder can be written to.
func TestDelBusy(t *testing.T) {
	n := newNode(t, "undeletable", 122, "nftables")
	before := watch(t)
	for _, plugin := range []string{"bridge", "host-local"} {
		t.Run("C-51 DEL of "+plugin+" with a lease that cannot be deleted", func(t *testing.T) {
			n := n.in(t)
			h := n.attach("undeletable")
			lease := "/var/lib/cni/networks/undeletable/" + h.result.IPs[1].Address.IP.String()
			if err := unix.Mount(lease, lease, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			del := h.call(0, "DEL")
			del.plugin = plugin
			o := del.run(t)
			if err := unix.Unmount(lease, 0); err != nil {
				t.Fatal(err)
			}
			o.refused(t, 11)
			h.del()
			before.clean(t, "the next DEL")
		})
	}
}

// TestDelTexts: a DEL that fails must not say what runtimes take for success; refused looks for it.
func TestDelTexts(t *testing.T) {
	s := newStub(t)
	s.call("ADD").run(t).ok(t)
	const gone = `{"cniVersion":"1.1.0","code":5,"msg":"lease not found: open x: no such file or directory","details":"not found\nno such file"}`
	for title, c := range inOrder(map[string]call{
		"C-53 the IPAM plugin is missing":           s.call("DEL").with("CNI_PATH", binDir()),
		"C-53 CNI_PATH is missing":                  s.call("DEL").with("CNI_PATH", ""),
		"C-53 the IPAM plugin says not found":       s.call("DEL").with("SAY", gone),
		"C-53 the IPAM plugin says nothing":         s.call("DEL").with("SAY", " "),
		"C-53 the IPAM plugin says no JSON":         s.call("DEL").with("SAY", "not found"),
		"C-53 the configuration is cut off":         s.call("DEL").config(`{"name": "not found`),
		"C-53 the name of the network is not found": s.call("DEL").config(`{"name": "not found"}`),
	}) {
		t.Run(title, func(t *testing.T) {
			s.on(t, "DEL", `[ -z "$SAY" ] || { printf %s "$SAY"; exit 1; }`)
			c.run(t).refused(t, append(allCodes(), codeEnv)...)
		})
	}
	s.call("DEL").run(t).ok(t)
	s.f.oracle.clean(t, "DEL")
}
