// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestFirewalldChain: firewalld's chain ends with a reject rule, with each of its backends. Only firewalld can add to its own chain, so the
// remedy adds the bridge to a zone.
func TestFirewalldChain(t *testing.T) {
	for backend, rules := range map[string]string{
		"nftables": "table inet firewalld { chain filter_FORWARD { type filter hook forward priority 10; ct state established accept; reject; }; }",
		"iptables": "table ip filter { chain FORWARD { type filter hook forward priority 0; ct state established accept; reject; }; }",
	} {
		t.Run(backend, func(t *testing.T) {
			l := newLab(t)
			l.run("firewalld")
			l.write("etc/firewalld/firewalld.conf", "FirewallBackend="+backend+"\n")
			l.nft(rules)
			if found := l.problems("forward-policy"); len(found) != 1 || !strings.Contains(found[0], "| firewall-cmd --permanent --zone=trusted") {
				t.Errorf("%q", found)
			}
		})
	}
}

// TestDottedLink: the remedies have keys that sysctl(8) accepts, also for links with a dot in their name, such as the VLAN lan.5.
func TestDottedLink(t *testing.T) {
	l := newLab(t)
	l.uplink("lan.5", "lan.6")
	l.command("ip", "-6", "route", "add", "default", "dev", "lan.5", "proto", "ra")
	for path, value := range map[string]string{"all/rp_filter": "0", "lan.5/rp_filter": "1", "lan.6/rp_filter": "1"} {
		l.sysctl("ipv4/conf/"+path, value)
	}
	l.sysctl("ipv6/conf/all/forwarding", "1")
	l.sysctl("ipv6/conf/lan.5/accept_ra", "1")
	l.sysctl("ipv6/conf/lan.6/accept_ra", "2")
	for check, want := range map[string]int{"rp-filter": 2, "router-advertisements": 1} {
		found, err := Examine(l.Options, check)
		if err != nil || len(found) != want {
			t.Fatalf("%s: %+v, %v", check, found, err)
		}
		for _, f := range found {
			l.command("sh", "-c", f.Command)
		}
		if left := l.problems(check); len(left) > 0 {
			t.Errorf("%s: after the remedy still %q", check, left)
		}
	}
}

// TestForwardingKeepsRoute: with accept_ra = 1, enabling forwarding makes the kernel drop the default route of a router advertisement. Fix
// and the printed command keep it.
func TestForwardingKeepsRoute(t *testing.T) {
	remedies := map[string]func(*lab, Finding) error{
		"fix": func(_ *lab, f Finding) error { return f.Fix() },
		"command": func(l *lab, f Finding) error {
			l.command("sh", "-c", strings.Split(f.Command, "; grep")[0])
			return nil
		},
	}
	newLab(t).live("fd91::/64")
	for name, apply := range remedies {
		l := newLab(t)
		l.uplink("lan7")
		l.command("ip", "-6", "route", "add", "default", "dev", "lan7", "proto", "ra")
		l.sysctl("ipv6/conf/all/forwarding", "0")
		l.sysctl("ipv6/conf/lan7/accept_ra", "1")
		n, err := look(l.Options)
		if err != nil {
			t.Fatal(err)
		}
		defer n.host.Close()
		found := n.forwarding()
		if len(found) != 1 || !strings.Contains(found[0].Evidence, "net.ipv6.conf.all.forwarding") {
			t.Fatalf("%s: %+v", name, found)
		}
		if err := apply(&l, found[0]); err != nil {
			t.Fatal(err)
		}
		if value, _ := n.number("ipv6/conf/lan7/accept_ra"); value != 2 {
			t.Errorf("%s: accept_ra = %d, want 2", name, value)
		}
		if value, _ := n.number("ipv6/conf/all/forwarding"); value != 1 {
			t.Errorf("%s: forwarding = %d, want 1", name, value)
		}
		l.command("ip", "link", "del", "lan7")
	}
}

// TestRunningContainerd: the configuration file in the running containerd's command line counts, and an unused /etc/containerd/config.toml
// does not.
func TestRunningContainerd(t *testing.T) {
	for cmdline, unused := range map[string]bool{
		"/usr/bin/containerd\x00": false,
		"":                        false,
		"/usr/bin/containerd\x00--config\x00/opt/runtime/config.toml\x00": true,
		"/usr/bin/containerd\x00--config=/opt/runtime/config.toml\x00":    true,
		"containerd\x00-c\x00/opt/runtime/config.toml\x00-l\x00debug\x00": true,
	} {
		l := newLab(t)
		text, err := os.ReadFile(l.Root + containerdConfig)
		if err != nil {
			t.Fatal(err)
		}
		l.write("opt/runtime/config.toml", string(text))
		l.write("etc/containerd/config.toml", "[[")
		l.run("containerd")
		l.write("proc/7/cmdline", cmdline)
		if found := l.problems("runtime"); (len(found) == 0) != unused {
			t.Errorf("%q: %q", cmdline, found)
		}
	}
}

// TestDockersContainerd: Docker's package of containerd disables the CRI, so no kubelet can use it and its folders are ignored.
func TestDockersContainerd(t *testing.T) {
	for _, name := range []string{"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		l := newLab(t)
		l.write("etc/containerd/config.toml", "disabled_plugins = [\""+name+"\"]\n")
		l.run("containerd")
		found := strings.Join(l.problems("runtime"), "\n")
		if !strings.Contains(found, "no container runtime was found | /etc/containerd/config.toml disables the plugin "+name) {
			t.Errorf("alone: %q", found)
		}
		l.write("etc/crio/crio.conf", crioConf(l, ""))
		if found := l.problems("runtime"); len(found) > 0 {
			t.Errorf("with CRI-O: %q", found)
		}
	}
}

// TestReloadUnit: if the deb or rpm installed the unit, the remedy only enables and starts it.
func TestReloadUnit(t *testing.T) {
	l := newLab(t)
	l.run("firewalld")
	if found := l.problems("firewall-reload"); len(found) != 0 {
		t.Errorf("firewalld leaves the tables of nftables: %q", found)
	}
	l.byIPTables()
	const enable = "systemctl enable podlace-reload.service; systemctl restart podlace-reload.service"
	if found := l.problems("firewall-reload"); len(found) != 1 || !strings.HasSuffix(found[0], "/etc/systemd/system/; "+enable) {
		t.Errorf("make install: %q", found)
	}
	l.write("usr/lib/systemd/system/podlace-reload.service", "")
	if found := l.problems("firewall-reload"); len(found) != 1 || !strings.HasSuffix(found[0], "| "+enable) {
		t.Errorf("package: %q", found)
	}
	l.write("proc/8/comm", "podlace-node\n")
	l.status(`{"ready": true, "routes": false}`)
	if found := l.problems("firewall-reload"); len(found) != 1 {
		t.Errorf("podlace-node without routes restores nothing: %q", found)
	}
	l.status(`{"ready": true, "routes": true}`)
	if found := l.problems("firewall-reload"); len(found) != 0 {
		t.Errorf("podlace-node restores the rules: %q", found)
	}
}

// TestKubeletCommand: k3s and RKE2 contain the kubelet in their own process, so the remedy names their unit.
func TestKubeletCommand(t *testing.T) {
	for unit, file := range map[string]string{"kubelet": "", "k3s": "etc/systemd/system/k3s.service",
		"k3s-agent":  "etc/systemd/system/k3s-agent.service",
		"rke2-agent": "usr/local/lib/systemd/system/rke2-agent.service"} {
		l := newLab(t)
		l.write("net.d/10-podlace.conflist", `{"name": "x", "plugins": [{"type": "bridge"}, {"type": "sriov"}]}`)
		if file != "" {
			l.write(file, "")
		}
		if found := strings.Join(l.problems("kubelet"), "\n"); !strings.Contains(found, "| systemctl status "+unit+"\n") ||
			!strings.Contains(found, "podlace-podresources is missing") {
			t.Errorf("%s: %s", unit, found)
		}
	}
}

// TestUnmanagedAppends: the remedy appends to NetworkManager's list of unmanaged devices. If it replaced the list, interfaces that other
// files exclude would be managed again.
func TestUnmanagedAppends(t *testing.T) {
	l := newLab(t)
	l.run("NetworkManager")
	l.write("etc/NetworkManager/conf.d/calico.conf", "[keyfile]\nunmanaged-devices=interface-name:cali*\n")
	found := l.problems("networkmanager")
	if len(found) != 1 || !strings.Contains(found[0], `\nunmanaged-devices+=interface-name:veth*;interface-name:cnidoc\n`) {
		t.Fatalf("%q", found)
	}
	l.write("etc/NetworkManager/conf.d/podlace.conf", "[keyfile]\nunmanaged-devices+=interface-name:veth*;interface-name:cnidoc\n")
	if left := l.problems("networkmanager"); len(left) > 0 {
		t.Errorf("after the remedy: %q", left)
	}
}

// TestSharedBridge: a bridge of two networks is reported once.
func TestSharedBridge(t *testing.T) {
	l := newLab(t)
	l.write("net.d/20-more.conflist", strings.NewReplacer(`"pods"`, `"more"`, "10.91.0", "10.92.0").Replace(ours))
	l.uplink("lan8")
	l.bridge("cnidoc", 9000)
	if found := l.problems("mtu"); len(found) != 1 {
		t.Errorf("%q", found)
	}
}

// TestShippedConflist: 10-podlace.conflist has a fixed subnet, with which pods of several nodes of a cluster would get the same addresses.
func TestShippedConflist(t *testing.T) {
	for want, spoil := range map[string]func(l *lab){
		"install -m 600 conf/10-podlace.conflist ":            func(*lab) {},
		"install -m 600 conf/10-podlace-kubernetes.conflist ": func(l *lab) { l.run("kubelet") },
		"install -m 600 conf/10-podlace-kubernetes.conflist":  func(l *lab) { l.write("etc/systemd/system/k3s-agent.service", "") },
		"install -m 600 conf/10-podlace-k3s.conflist ":        func(l *lab) { l.write("etc/systemd/system/k3s.service", "") },
		"install -m 600 /usr/share/doc/podlace/examples/10-podlace.conflist ": func(l *lab) {
			l.write("usr/share/doc/podlace/examples/10-podlace.conflist", "")
		},
	} {
		l := newLab(t)
		spoil(&l)
		os.Remove(l.ConfDir + "/10-podlace.conflist")
		if found := strings.Join(l.problems("conflist"), "\n"); !strings.Contains(found, "| "+want) {
			t.Errorf("%q, want %q", found, want)
		}
	}
}

// TestDefaultNetworkFile: the finding names the CRI-O drop-in that sets the default network.
func TestDefaultNetworkFile(t *testing.T) {
	l := newLab(t)
	l.write("etc/crio/crio.conf", crioConf(l, ""))
	l.write("etc/crio/crio.conf.d/10-net.conf", "[crio.network]\ncni_default_network = \"other\"\n")
	l.write("etc/crio/crio.conf.d/99-log.conf", "[crio.runtime]\nlog_level = \"info\"\n")
	const want = "| remove cni_default_network from /etc/crio/crio.conf.d/10-net.conf and restart CRI-O"
	if found := strings.Join(l.problems("conflist"), "\n"); !strings.Contains(found, want) {
		t.Errorf("%s", found)
	}
}

// TestPackagedPlugins: with the deb or the rpm, the plugins are in a separate folder and there is no source tree for 'make install'.
func TestPackagedPlugins(t *testing.T) {
	for _, packaged := range []bool{false, true} {
		l := newLab(t)
		os.Remove(l.BinDir + "/bridge")
		l.plugin("host-local", "plugin v1.9.1")
		want := "| make install CNI_BIN_DIR=" + l.BinDir
		if packaged {
			l.write("usr/libexec/podlace/cni/bridge", "")
			want = "| put /usr/libexec/podlace/cni first in bin_dirs of containerd 2,"
		}
		found := l.problems("binaries")
		if len(found) == 0 || slices.ContainsFunc(found, func(f string) bool { return !strings.Contains(f, want) }) {
			t.Errorf("packaged %v: %q", packaged, found)
		}
	}
}

// TestOtherPlugins: another project's plugin "tuning" is no problem, because Podlace has none of this name.
func TestOtherPlugins(t *testing.T) {
	l := newLab(t)
	l.write("net.d/10-podlace.conflist", strings.Replace(ours, `/29"}]]}}`, `/29"}]]}}, {"type": "tuning"}`, 1))
	l.plugin("tuning", "plugin v1.9.1")
	if found := l.problems("binaries"); len(found) > 0 {
		t.Errorf("%q", found)
	}
}
