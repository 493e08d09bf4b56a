// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
)

// pluginChain is a list of plugins, each of which gets the result of the one before.
type pluginChain []chainStep

// fullChain returns the chain of a usual node.
func fullChain(backend string) pluginChain {
	common := object{"cniVersion": "1.1.0", "name": "fault-" + backend}
	return pluginChain{
		{"bridge", common.With("type", "bridge", "bridge", "ft-"+backend[:3], "isGateway", true, "ipMasq", true, "ipMasqBackend", backend,
			"hairpinMode", true,
			"ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.80.0.0/24"}}, []any{object{"subnet": "fd00:80::/64"}}},
				"routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}})},
		{"portmap", common.With("type", "portmap", "backend", backend, "runtimeConfig", object{"portMappings": []any{
			object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}, object{"hostPort": 5353, "containerPort": 53, "protocol": "udp"}}})},
		{"bandwidth", common.With("type", "bandwidth", "runtimeConfig",
			object{"bandwidth": object{"ingressRate": 20_000_000, "egressRate": 10_000_000}})},
	}
}

// singleChains returns chains of one plugin. host-local gets the configuration that a main plugin would pass.
func singleChains() map[string]pluginChain {
	common := object{"cniVersion": "1.1.0", "name": "alone"}
	return map[string]pluginChain{
		"host-local": {{"host-local", common.With("type", "bridge", "ipam",
			object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.81.0.0/24"}},
				[]any{object{"subnet": "fd00:81::/64"}}}})}},
		"loopback": {{"loopback", common.With("type", "loopback")}},
		"guarded": {{"bridge", common.With("type", "bridge", "bridge", "ft-guard", "antiSpoof", true,
			"ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.82.0.0/24"}},
				[]any{object{"subnet": "fd00:82::/64"}}}})}},
		"sriov": {{"sriov", common.With("type", "sriov", "resources", []any{card.Resource}, "mtu", 1400,
			"ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.83.0.0/24"}}},
				"routes": []any{object{"dst": "192.0.2.0/24"}}})}},
		"sriov after others": {{"sriov", common.With("type", "sriov", "resources", []any{card.Resource}, "mac", "02:00:00:00:00:01")}},
		"l2": {{"bridge", common.With("type", "bridge", "bridge", "ft-l2", "promiscMode", true, "portIsolation", true, "mtu",
			1400)}},
	}
}

// faultWorld is a chain with a pod. It has already run for another pod of the node.
type faultWorld struct {
	*testing.T
	chain pluginChain
	pod   *sandbox.Pod
	prev  []byte // result of a foreign main plugin
	opt   snapshot.Options
	base  *snapshot.Snapshot // snapshot before the pod's first ADD
}

// newWorld first runs the whole chain for another pod, so that the shared bridge and tables exist. Without a main plugin, connectPod takes
// its place.
func newWorld(t *testing.T, c pluginChain) faultWorld {
	t.Helper()
	if c[0].plugin == "sriov" { // without the kubelet's folder, STATUS logs a warning and records that it has done so
		kubelet := t.TempDir()
		if err := os.Mkdir(filepath.Join(kubelet, "pod-resources"), 0o700); err != nil {
			t.Fatal(err)
		}
		c = pluginChain{{c[0].plugin, c[0].conf.With("kubeletDir", kubelet)}}
	}
	first := faultWorld{T: t, chain: c, pod: kerneltest.NewPod(t)}
	w := faultWorld{T: t, chain: c, pod: kerneltest.NewPod(t)}
	if p := c[0].plugin; p == "sriov" {
		card.New(t, map[bool]int{true: 2, false: 1}[c[0].conf["mac"] == nil])
	}
	if p := c[0].plugin; p == "portmap" || p == "bandwidth" || p == "sriov" && c[0].conf["mac"] != nil {
		first.prev, w.prev = connectPod(t, first.pod, 1), connectPod(t, w.pod, 2)
	}
	first.addChain(len(c))
	first.delChain(len(c))
	w.opt = snapshot.Options{Pods: []*sandbox.Pod{w.pod}, Dirs: harness.StateDirs(),
		// Hints stay, as does the empty lock file of the first GC, and the address that the kernel gives lo when a program first sets it up.
		Ignore: regexp.MustCompile(`^host: file (.*/(last_reserved_ip\.\d+|podlace_boot)|/run/podlace/\.guards\.lock)$` +
			`|: address 127\.0\.0\.1/8 dev lo$`)}
	w.base = w.take()
	return w
}

// connectPod gives a pod a veth pair with an address, as ptp does, and returns the result.
func connectPod(t *testing.T, pod *sandbox.Pod, n int) []byte {
	t.Helper()
	netns, err := os.Open(pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	inside, err := kernel.Open(netns)
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	name := fmt.Sprint("ftveth", n)
	if _, err := host.AddVeth(kernel.Veth{Host: name, Pod: "eth0", Netns: netns}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if host, err := kernel.Host(); err == nil {
			_ = host.DelLink(name)
			host.Close()
		}
	})
	for ns, p := range map[*kernel.NS]string{&host.NS: name + " 10.82.%d.1/24", inside: "eth0 10.82.%d.5/24"} {
		link, address, _ := strings.Cut(p, " ")
		l, _, err := ns.Link(link)
		if err := errors.Join(err, ns.AddAddress(l, netip.MustParsePrefix(fmt.Sprintf(address, n)), false), ns.SetUp(l)); err != nil {
			t.Fatal(err)
		}
	}
	// portmap sets this sysctl and leaves it to the main plugin, which deletes the link. Without one, it must be set beforehand.
	if err := host.Set(kernel.Sysctl{Path: "ipv4/conf/" + name + "/route_localnet", Value: "1"}); err != nil {
		t.Fatal(err)
	}
	return fmt.Appendf(nil, `{"cniVersion":"1.1.0","interfaces":[{"name":"%s"},{"name":"eth0","sandbox":"%s"}],"ips":[{"address":"10.82.%d.5/24","interface":1}]}`,
		name, pod.Path, n)
}

func (w faultWorld) take() *snapshot.Snapshot {
	w.Helper()
	s, err := snapshot.Take(w.opt)
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// inSubtest returns a copy that reports failures to the subtest.
func (w faultWorld) inSubtest(t *testing.T) faultWorld {
	w.T = t
	return w
}

// checkSame fails the test unless the node is as in the snapshot.
func (w faultWorld) checkSame(before *snapshot.Snapshot) {
	w.Helper()
	kerneltest.NoLeak(w.T, before, w.opt)
}

// callOf returns a call of plugin i of the chain.
func (w faultWorld) callOf(i int, verb string, prev []byte) pluginCall {
	return pluginCall{chainStep: w.chain[i], verb: verb, pod: w.pod, prev: prev}
}

// addChain runs ADD of the first n plugins and returns the last result.
func (w faultWorld) addChain(n int) (prev []byte) {
	w.Helper()
	prev = w.prev
	for i := range n {
		prev = w.callOf(i, "ADD", prev).mustRun(w.T).stdout
	}
	return prev
}

func (w faultWorld) delChain(n int) {
	w.Helper()
	for i := n - 1; i >= 0; i-- {
		w.callOf(i, "DEL", nil).mustRun(w.T)
	}
}

// forEachChain runs a test with the full chain on both backends, and with each plugin alone.
func forEachChain(t *testing.T, test func(faultWorld)) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
				t.Skip("SKIPPED: iptables is not installed")
			}
			test(newWorld(t, fullChain(backend)))
		})
	}
	forEachShortChain(t, test)
}

// forEachShortChain runs a test with portmap and bandwidth behind another project's main plugin, and with each alone.
func forEachShortChain(t *testing.T, test func(faultWorld)) {
	foreign := fullChain("nftables")[1:]
	t.Run("foreign", func(t *testing.T) { test(newWorld(t, foreign)) })
	for name, c := range singleChains() {
		t.Run(name, func(t *testing.T) { test(newWorld(t, c)) })
	}
}
