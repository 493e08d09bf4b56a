// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"strings"
	"testing"
)

func remedyCases() map[string]breakage {
	return map[string]breakage{
		"containerd's loopback": {"binaries", func(l *lab) { os.Remove(l.BinDir + "/loopback") }, "error the plugin loopback is missing"},
		"CRI-O without loopback": {"binaries", func(l *lab) {
			os.RemoveAll(l.Root + "/etc/containerd")
			l.write("etc/crio/crio.conf.d/1", crioConf(*l, ""))
			os.Remove(l.BinDir + "/loopback")
			os.Remove(l.BinDir + "/bridge")
		}, "error the plugin bridge is missing"},
		"misspelt type": {"binaries", func(l *lab) {
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, "host-local", "hostlocal", 1))
		}, "| Podlace has no plugin hostlocal: correct the type in "},
		"not executable": {"binaries", func(l *lab) { os.Chmod(l.BinDir+"/bridge", 0o644) }, "/bin/bridge: permission denied | chmod 755 /"},
		"empty folder":   {"conflist", func(l *lab) { os.Remove(l.ConfDir + "/10-podlace.conflist") }, "/net.d is empty | "},
		"STATUS without node.json": {"status", func(l *lab) {
			l.write("bin/bridge", strings.Replace(statusFails, "no room", "neither /run/podlace/node.json nor", 1))
		}, "| podlace-node status; without podlace-node, "},
		"no node.json": {"addresses", func(l *lab) {
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, "10.91.0.0/29", "usePodCidr", 1))
		}, "| podlace-node status; without podlace-node, with the keys in conf/README.md: mkdir -p -m 700 /run/podlace && kubectl get node NODE "},
		"lease folder": {"addresses", func(l *lab) {
			os.RemoveAll("/var/lib/cni/networks/pods")
			l.machine("/var/lib/cni/networks/pods", "")
		}, "| ls -ld /var/lib/cni/networks/*"},
		"reject at the end": {"forward-policy", func(l *lab) {
			l.nft("table inet foreign { chain forward { type filter hook forward priority 0; ct state established accept; counter reject; }; }")
		}, "chain inet foreign forward of nf_tables ends with a rule that drops all other packets, and no"},
		"iptables' REJECT at the end": {"forward-policy", func(l *lab) {
			l.nft("table inet foreign { }")
			l.command("iptables", "-A", "FORWARD", "-j", "REJECT", "--reject-with", "icmp-host-prohibited")
		}, "chain ip filter FORWARD of nf_tables ends with a rule that drops all other packets"},
	}
}

// TestLastRule: a chain whose last rule drops only some packets or none is no problem.
func TestLastRule(t *testing.T) {
	for _, rule := range []string{"ct state invalid drop", "iifname lan0 reject", "counter accept", "log"} {
		l := newLab(t)
		l.nft("table inet foreign { chain forward { type filter hook forward priority 0; " + rule + "; }; }")
		if found := l.problems("forward-policy"); len(found) > 0 {
			t.Errorf("%s: %q", rule, found)
		}
	}
}

// TestLoopback: another project's loopback plugin is no problem, nor is a missing one that containerd does not start.
func TestLoopback(t *testing.T) {
	l := newLab(t)
	l.plugin("loopback", "plugin v1.9.1")
	if found := l.problems("binaries"); len(found) > 0 {
		t.Errorf("foreign: %q", found)
	}
	os.Remove(l.BinDir + "/loopback")
	text, err := os.ReadFile(l.Root + "/etc/containerd/config.toml")
	if err != nil {
		t.Fatal(err)
	}
	l.write("etc/containerd/config.toml", string(text)+"use_internal_loopback = true\n")
	if found := l.problems("binaries"); len(found) > 0 {
		t.Errorf("internal: %q", found)
	}
}

// TestUnusable: a folder with only an unusable file is not reported as empty.
func TestUnusable(t *testing.T) {
	l := newLab(t)
	l.write("net.d/10-podlace.conflist", "{")
	found := strings.Join(l.problems("conflist"), "\n")
	if !strings.Contains(found, "no file in "+l.ConfDir+" can be used") || strings.Contains(found, "is empty") {
		t.Error(found)
	}
}
