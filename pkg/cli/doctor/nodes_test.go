// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
)

// programs adds processes to the fake /proc.
func (l lab) programs(names ...string) {
	for i, name := range names {
		l.write(fmt.Sprintf("proc/%d/comm", 100+i), name+"\n")
	}
}

// live attaches a pod to cnidoc by the real plugin, with the subnets of the node, or without an address.
func (l lab) live(subnets ...string) {
	l.t.Helper()
	var ranges []any
	for _, subnet := range subnets {
		ranges = append(ranges, []any{kerneltest.Object{"subnet": subnet}})
	}
	conf := kerneltest.Object{"cniVersion": "1.1.0", "name": "pods", "type": "bridge", "bridge": "cnidoc"}
	if len(subnets) > 0 {
		conf = conf.With("isGateway", true, "ipam", kerneltest.Object{"type": "host-local", "ranges": ranges})
	}
	pod := kerneltest.Lab{T: l.t, Plugin: bridge.Plugin(hostlocal.Plugin()).Run, Pod: kerneltest.NewPod(l.t), Conf: conf}
	pod.OK(pod.Call("ADD", "web"))
	l.t.Cleanup(func() {
		pod.OK(pod.Call("DEL", "web"))
		l.command("ip", "link", "del", "cnidoc")
	})
	text, err := json.Marshal(kerneltest.Object{"cniVersion": "1.0.0", "name": "pods", "plugins": []any{conf}})
	kerneltest.Must(l.t, err)
	l.write("net.d/10-podlace.conflist", string(text))
}

// cached adds an attachment of podman 4, which uses CNI with plugins in a folder of its own, to libcni's cache.
func (l lab) cached(plugins string) {
	entry, err := json.Marshal(map[string]any{"kind": "cniCacheV1", "networkName": "podman", "containerId": "p", "ifName": "eth0",
		"netns": kerneltest.NewPod(l.t).Path, "result": map[string]any{"cniVersion": "0.4.0"},
		"config": []byte(`{"cniVersion": "0.4.0", "name": "podman", "plugins": [` + plugins + `]}`)})
	kerneltest.Must(l.t, err)
	l.machine("/var/lib/cni/results/podman-p-eth0", string(entry))
	l.machine("/var/lib/cni/networks/podman/10.88.0.2", "p\r\neth0")
	l.checks(`grep -q podman && { echo '{"code": 100, "msg": "made by another plugin"}'; exit 1; }; exit 0`)
}

const podman = `{"type": "bridge", "bridge": "cni-podman0"}, {"type": "portmap", "capabilities": {"portMappings": true}}, {"type": "firewall"}, {"type": "tuning"}`

func (l lab) containerd1() {
	l.write("etc/containerd/config.toml", "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nconf_dir = \""+l.ConfDir+
		"\"\nbin_dir = \""+l.BinDir+"\"\n")
}

func (l lab) crio(more string) {
	os.RemoveAll(l.Root + "/etc/containerd")
	l.write("etc/crio/crio.conf.d/10-crio.conf", crioConf(l, more))
	l.programs("crio")
}

// at moves containerd's configuration to the folder of k3s or RKE2.
func (l lab) at(file string) {
	text, err := os.ReadFile(l.Root + "/etc/containerd/config.toml")
	kerneltest.Must(l.t, err)
	os.RemoveAll(l.Root + "/etc/containerd")
	l.write(file, string(text))
}

func (l lab) foreign(name string) string {
	return `{"cniVersion": "0.4.0", "name": "` + name + `", "plugins": [{"type": "` + name + `"}]}`
}

// healthy is a node without a fault, with the codes of the warnings that are true of it.
type healthy struct {
	build    func(lab)
	warnings string
}

func healthyNetworks() map[string]healthy {
	return map[string]healthy{
		"containerd 2":         {func(lab) {}, ""},
		"containerd 1.6":       {lab.containerd1, ""},
		"a pod":                {func(l lab) { l.uplink("upl0"); l.live("10.91.0.0/29") }, ""},
		"no default route":     {func(l lab) { l.live("10.91.0.0/29", "fd91::/64") }, ""},
		"IPv6 only":            {func(l lab) { l.live("fd91::/64") }, ""},
		"layer 2":              {func(l lab) { l.live() }, ""},
		"CRI-O":                {func(l lab) { l.crio("plugin_dirs = [\"/usr/libexec/cni\", \"" + l.BinDir + "\"]\n") }, ""},
		"podman 5 beside":      {func(l lab) { l.write("etc/containers/networks/podman.json", "{}"); l.programs("netavark") }, ""},
		"podman 4, containerd": {func(l lab) { l.cached(podman) }, ""},
		"podman 4, CRI-O":      {func(l lab) { l.crio(""); l.cached(podman) }, ""},
		"podman 4 behind": {func(l lab) {
			l.write("net.d/87-podman-bridge.conflist", `{"cniVersion": "0.4.0", "name": "podman", "plugins": [`+podman+`]}`)
			l.cached(podman)
		}, ""},
		"flannel behind": {func(l lab) { l.write("net.d/50-flannel.conflist", l.foreign("flannel")) }, ""},
		"CRI-O, its own file before": {func(l lab) {
			l.crio("cni_default_network = \"pods\"\n")
			l.write("net.d/00-loopback.conf", `{"cniVersion": "0.4.0", "name": "lo", "type": "loopback"}`)
		}, ""},
		"Multus before": {func(l lab) {
			l.write("net.d/00-multus.conf", `{"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus", "clusterNetwork": "`+
				l.ConfDir+`/10-podlace.conflist"}`)
		}, ""},
		"Multus' thick plugin before": {func(l lab) {
			l.write("net.d/00-multus.conf", `{"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus-shim"}`)
		}, ""},
	}
}

func healthyNeighbours() map[string]healthy {
	const folder = "var/lib/rancher/"
	return map[string]healthy{
		"Docker beside": {func(l lab) {
			l.live("10.91.0.0/29")
			l.programs("containerd", "dockerd")
			l.nft("table ip filter { chain DOCKER-USER { iifname cnidoc accept; oifname cnidoc accept; }; " +
				"chain FORWARD { type filter hook forward priority 0; policy drop; jump DOCKER-USER; }; }")
		}, ""},
		"Docker's containerd": {func(l lab) {
			l.write("etc/containerd/config.toml", "disabled_plugins = [\"cri\"]\n")
			l.programs("containerd", "dockerd")
		}, "no-runtime"},
		"firewalld": {func(l lab) {
			l.live("10.91.0.0/29")
			l.programs("firewalld")
			l.write("etc/firewalld/zones/trusted.xml", `<zone target="ACCEPT"><interface name="cnidoc"/></zone>`)
			l.nft("table inet firewalld { chain filter_FORWARD { type filter hook forward priority 10; policy accept; " +
				"ct state established accept; iifname cnidoc accept; reject; }; }")
		}, ""},
		"ufw": {func(l lab) {
			l.write("etc/ufw/ufw.conf", "ENABLED=yes\n")
			l.write("etc/ufw/user.rules", "-A ufw-user-forward -i cnidoc -j ACCEPT\n-A ufw-user-forward -o cnidoc -j ACCEPT\n")
		}, ""},
		"managers": {func(l lab) {
			l.programs("NetworkManager", "systemd-network", "podlace-node")
			l.status(`{"ready": true}`)
			l.write("etc/NetworkManager/conf.d/podlace.conf", "[keyfile]\nunmanaged-devices+=interface-name:veth*;interface-name:cnidoc\n")
			l.write("etc/systemd/networkd.conf.d/podlace.conf", "[Network]\nManageForeignRoutes=no\n")
		}, ""},
		"k3s": {func(l lab) {
			l.at(folder + "k3s/agent/etc/containerd/config.toml")
			l.write("etc/systemd/system/k3s.service", "")
			l.programs("k3s-server", "containerd")
		}, ""},
		"k3s, Docker's containerd beside": {func(l lab) {
			l.at(folder + "k3s/agent/etc/containerd/config.toml")
			l.write("etc/containerd/config.toml", "version = 2\n")
			l.programs("k3s-server", "containerd", "dockerd")
		}, "runtime-bin-dir runtime-conf-dir"},
		"RKE2": {func(l lab) {
			l.at(folder + "rke2/agent/etc/containerd/config.toml")
			l.write("etc/systemd/system/rke2-agent.service", "")
		}, ""},
		"no runtime": {func(l lab) { os.RemoveAll(l.Root + "/etc") }, "no-runtime"},
		"cluster, agent's first minute": {func(l lab) {
			l.programs("kubelet", "containerd", "podlace-node")
			l.status(`{"ready": false}`)
			os.Remove(l.ConfDir + "/10-podlace.conflist")
		}, "no-network"},
		"cluster": {func(l lab) {
			l.programs("kubelet", "containerd", "podlace-node")
			l.status(`{"ready": true, "peers": [{}, {}]}`)
			os.Remove(l.BinDir + "/bridge")
			os.Remove(l.BinDir + "/host-local")
			l.plugin("podlace-bridge", "plugin of Podlace v1")
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, `"bridge", "bridge"`, `"podlace-bridge", "bridge"`, 1))
		}, ""},
	}
}

// TestHealthyNodes: doctor reports no error on nodes that differ and are healthy, and only the warnings that are true.
func TestHealthyNodes(t *testing.T) {
	nodes := healthyNetworks()
	maps.Copy(nodes, healthyNeighbours())
	for name, node := range nodes {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.sysctl("ipv6/conf/all/forwarding", "0")
			l.sysctl("ipv4/ip_forward", "0")
			node.build(l)
			found, err := Examine(l.Options)
			kerneltest.Must(t, err)
			var warnings []string
			for _, f := range found {
				switch {
				case f.Check == "kernel-features": // depends on the machine
				case f.Level == Error:
					t.Errorf("%s: %s: %s", f.Check, f.What, f.Evidence)
				case f.Level == Warning:
					warnings = append(warnings, string(f.Code))
				}
			}
			slices.Sort(warnings)
			if got := strings.Join(warnings, " "); got != node.warnings {
				t.Errorf("warnings %q, want %q: %+v", got, node.warnings, found)
			}
		})
	}
}

// TestOnly: an unknown check is an error.
func TestOnly(t *testing.T) {
	if _, err := Examine(newLab(t).Options, "conflits"); err == nil || !strings.Contains(err.Error(), `"conflits"`) {
		t.Errorf("got %v", err)
	}
	names := Names()
	slices.Sort(names)
	if unique := slices.Compact(slices.Clone(names)); len(unique) != len(names) {
		t.Errorf("two checks have one name: %q", names)
	}
}
