// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

const ours = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cnidoc", "isGateway": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.91.0.0/29"}]]}}]}`

// lab is a simulated node without problems.
type lab struct {
	t *testing.T
	Options
}

func newLab(t *testing.T) lab {
	t.Helper()
	root := t.TempDir()
	l := lab{t, Options{ConfDir: filepath.Join(root, "net.d"), BinDir: filepath.Join(root, "bin"), Root: root}}
	l.write("net.d/10-podlace.conflist", ours)
	l.write("etc/containerd/config.toml", "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".cni]\nconf_dir = \""+l.ConfDir+
		"\"\nbin_dirs = [\""+l.BinDir+"\"]\n")
	l.plugin("bridge", "plugin of Podlace v1")
	l.plugin("host-local", "plugin of Podlace v1")
	l.plugin("loopback", "plugin of Podlace v1")
	return l
}

// write writes another program's file below the test folder that stands for /.
func (l lab) write(name, text string) {
	l.t.Helper()
	path := filepath.Join(l.Root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		l.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		l.t.Fatal(err)
	}
}

// plugin installs a fake plugin that prints the version banner and succeeds for every verb.
func (l lab) plugin(name, banner string) {
	l.t.Helper()
	path := filepath.Join(l.BinDir, name)
	l.write("bin/"+name, "#!/bin/sh\n[ -n \"$CNI_COMMAND\" ] || echo 'CNI "+name+" "+banner+"' >&2\n")
	if err := os.Chmod(path, 0o755); err != nil {
		l.t.Fatal(err)
	}
}

// run adds a process to the fake /proc.
func (l lab) run(name string) { l.write("proc/7/comm", name+"\n") }

func (l lab) sysctl(path, value string) {
	l.t.Helper()
	file := filepath.Join("/proc/sys/net", path)
	before, err := os.ReadFile(file)
	if err != nil {
		l.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(value), 0o644); err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = os.WriteFile(file, before, 0o644) })
}

// command runs an installed program inside the namespaces of the test.
func (l lab) command(name string, args ...string) {
	l.t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		l.t.Skip("SKIPPED: this machine has no", name)
	}
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		l.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

// uplink creates a link with a default route until the test ends.
func (l lab) uplink(names ...string) {
	l.t.Helper()
	for i, name := range names {
		l.command("ip", "link", "add", name, "type", "veth", "peer", name+"p")
		l.t.Cleanup(func() { _ = exec.Command("ip", "link", "del", name).Run() })
		l.command("ip", "link", "set", name, "up")
		l.command("ip", "link", "set", name+"p", "up")
		l.command("ip", "route", "add", "default", "dev", name, "metric", string(rune('1'+i)))
	}
}

// advertised creates an uplink with an IPv6 default route of a router advertisement.
func (l lab) advertised(name string) {
	l.uplink(name)
	l.command("ip", "-6", "route", "add", "default", "dev", name, "proto", "ra", "metric", "1024")
}

// problems returns the findings of a check as text, without those of level ok or skipped.
func (l lab) problems(check string) (lines []string) {
	l.t.Helper()
	found, err := Examine(l.Options, check)
	if err != nil {
		l.t.Fatal(err)
	}
	for _, f := range found {
		if f.Level == OK || f.Level == Skipped {
			continue
		}
		if f.Evidence == "" || f.Consequence == "" || f.Command == "" || f.Code == "" {
			l.t.Errorf("%s: %q lacks evidence, consequence, command or code: %+v", check, f.What, f)
		}
		lines = append(lines, string(f.Level)+" "+f.What+" | "+f.Evidence+" | "+f.Command)
	}
	return lines
}

// TestHealthy: a healthy node has no findings except about missing kernel features.
func TestHealthy(t *testing.T) {
	l := newLab(t)
	for _, name := range Names() {
		if found := l.problems(name); len(found) > 0 && name != "kernel-features" {
			t.Errorf("%s: %q", name, found)
		}
	}
}

// TestSecondNetwork: a network behind the one that pods get is no problem, because Multus may use it.
func TestSecondNetwork(t *testing.T) {
	l := newLab(t)
	l.write("net.d/20-lan.conflist", strings.Replace(ours, `"pods"`, `"lan"`, 1))
	l.pod("a", ours)
	l.machine("/var/lib/cni/networks/lan/10.91.0.2", "a\r\nnet1")
	l.machine("/var/lib/cni/results/lan-a-net1", `{"kind": "cniCacheV1", "containerId": "a", "ifName": "net1", "networkName": "lan", "netns": "`+
		kerneltest.NewPod(t).Path+`", "result": {"cniVersion": "1.0.0"}}`)
	found, err := Examine(l.Options, "conflist")
	if err != nil || len(found) != 1 || found[0].Level != OK || !strings.Contains(found[0].What, `takes "pods" in `) {
		t.Errorf("%+v, %v", found, err)
	}
}

// breakage is a single problem of the node with the finding that doctor should report.
type breakage struct {
	check string
	spoil func(*lab)
	want  string // part of the only finding
}

func conflistCases() map[string]breakage {
	return map[string]breakage{
		"no configuration": {"conflist", func(l *lab) { os.RemoveAll(l.ConfDir) }, "error there is no folder "},
		"Multus for another one first": {"conflist", func(l *lab) {
			l.write("net.d/00-multus.conf", `{"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus", "delegates": [`+
				`{"cniVersion": "0.3.1", "name": "podlace-old", "type": "flannel"}]}`)
		}, `10-podlace.conflist | write "clusterNetwork": "pods" instead of "delegates" into `},
		"another one first": {"conflist", func(l *lab) {
			l.write("net.d/00-other.conflist", strings.Replace(strings.Replace(ours, `"pods"`,
				`"other"`, 1), `"bridge", "bridge"`, `"flannel", "bridge"`, 1))
		}, "00-other.conflist sorts before "},
		"a copy first": {"conflist", func(l *lab) {
			l.write("net.d/20-podlace.conflist", strings.Replace(ours, `"pods"`, `"podlace"`, 1))
		}, `warning the runtime does not take the network "podlace" | `},
		"another one before that of pods": {"conflist", func(l *lab) {
			l.write("net.d/00-lan.conflist", strings.Replace(ours, `"pods"`, `"lan"`, 1))
			l.pod("a", ours)
		}, `warning the runtime does not take the network "pods" | `},
		"only another one": {"conflist", func(l *lab) {
			l.write("net.d/10-podlace.conflist", `{"name": "x", "plugins": [{"type": "flannel"}]}`)
		}, `network "x" with flannel`},
		"half a file": {"conflist", func(l *lab) { l.write("net.d/20-x.conf", `{"name": `) }, "warning a configuration file cannot be used | "},
		"writable":    {"conflist", func(l *lab) { os.Chmod(l.ConfDir+"/10-podlace.conflist", 0o666) }, "has the mode 0666"},
		"CRI-O's default": {"conflist", func(l *lab) {
			l.write("etc/crio/crio.conf.d/1", crioConf(*l, "cni_default_network = \"lan\"\n"))
		}, `cni_default_network = "lan"`},
		"misspelt key": {"conflist-keys", func(l *lab) {
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, "isGateway", "isGatway", 1))
		}, "plugins[0].isGatway | unknown key is ignored; did you mean isGateway?"},
		"a link has the subnet": {"conflist-keys", func(l *lab) {
			l.uplink("lan0")
			l.command("ip", "address", "add", "10.91.0.1/24", "dev", "lan0")
		}, "10.91.0.0/24 dev lan0"},
		"missing plugin": {"binaries", func(l *lab) { os.Remove(l.BinDir + "/bridge") }, "error the plugin bridge is missing"},
		"foreign plugin": {"binaries", func(l *lab) { l.plugin("bridge", "plugin v1.9.1") }, `/bin/bridge prints "CNI bridge plugin v1.9.1"`},
		"broken plugin":  {"binaries", func(l *lab) { l.write("bin/bridge", "\x7fELF") }, "error the plugin bridge does not start | "},
		"two versions": {"binaries", func(l *lab) {
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, "}]]}}", `}]]}}, {"type": "portmap"}`, 1))
			l.plugin("portmap", "plugin of Podlace v2")
		}, "v1: bridge; v2: portmap | "},
		"STATUS fails": {"status", func(l *lab) { l.write("bin/bridge", statusFails) }, `network "pods" is not ready | bridge: code 50: no room`},
	}
}

func runtimeCases() map[string]breakage {
	return map[string]breakage{
		"containerd's folder": {"runtime", func(l *lab) { l.ConfDir = "/elsewhere" }, "etc/containerd/config.toml names "},
		"containerd 1, other plugins": {"runtime", func(l *lab) {
			l.write("etc/containerd/config.toml", "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nconf_dir = \""+l.ConfDir+
				"\"\nbin_dir = \"/usr/lib/cni\"\n")
		}, "containerd looks for no plugin in "},
		"import of containerd": {"runtime", func(l *lab) {
			l.write("etc/containerd/config.toml", "imports = [\"conf.d/*.toml\"]\n")
			l.write("etc/containerd/conf.d/cni.toml", "[plugins.\"io.containerd.cri.v1.runtime\".cni]\nconf_dir = \"/imported\"\nbin_dirs = [\""+
				l.BinDir+"\"]\n")
		}, "names /imported"},
		"its own file's name": {"runtime", func(l *lab) {
			kerneltest.Must(l.t, os.Rename(l.ConfDir+"/10-podlace.conflist", l.ConfDir+"/20-pods.conflist"))
			l.write("etc/containerd/config.toml", "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".cni]\nconf_dir = \"/elsewhere\"\n"+
				"bin_dirs = [\""+l.BinDir+"\"]\n")
		}, "| podlace doctor --conf-dir /elsewhere"},
		"broken TOML": {"runtime", func(l *lab) {
			l.write("etc/containerd/config.toml", "[[")
		}, "could not read the configuration of containerd"},
		"no runtime": {"runtime", func(l *lab) { os.RemoveAll(l.Root + "/etc") }, "warning no container runtime was found"},
	}
}

func stateCases() map[string]breakage {
	return map[string]breakage{
		"agent ended": {"node-agent", func(l *lab) { l.status(`{"ready": true}`) }, "error podlace-node does not run"},
		"agent not ready": {"node-agent", func(l *lab) {
			l.run("podlace-node")
			l.status(`{"ready": false, "problems": [{"what": "node b", "why": "it has no podCIDR", "do": "set it"}]}`)
		}, "error node b | it has no podCIDR | set it"},
		"strict filter": {"rp-filter", func(l *lab) {
			l.uplink("lan1", "lan2")
			l.sysctl("ipv4/conf/lan1/rp_filter", "1")
			l.sysctl("ipv4/conf/lan2/rp_filter", "2")
			l.sysctl("ipv4/conf/all/rp_filter", "0")
		}, "the reverse path filter of lan1 is strict"},
		"router advertisements": {"router-advertisements", func(l *lab) {
			l.advertised("lan3")
			l.sysctl("ipv6/conf/all/forwarding", "1")
			l.sysctl("ipv6/conf/lan3/accept_ra", "1")
		}, "net.ipv6.conf.lan3.accept_ra = 1"},
		"large MTU": {"mtu", func(l *lab) {
			l.uplink("lan4")
			l.bridge("cnidoc", 9000)
		}, "cnidoc has 9000 bytes, the uplink 1500"},
		"pool full": {"addresses", func(l *lab) {
			for _, a := range []string{"2", "3", "4", "5", "6"} {
				l.lease("10.91.0." + a)
			}
		}, "error network \"pods\" has no addresses left | 5 of 5 addresses are leased of 10.91.0.1-10.91.0.6 | run podlace gc while the runtime runs, because"},
		"bad range": {"addresses", func(l *lab) {
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, "10.91.0.0/29", "10.91.0.0/33", 1))
		}, "error network \"pods\" has no usable addresses"},
		"read-only": {"disk", func(l *lab) {
			l.command("mkdir", "-p", "/run/podlace")
			l.command("mount", "-t", "tmpfs", "-o", "ro", "none", "/run/podlace")
			l.t.Cleanup(func() { _ = exec.Command("umount", "/run/podlace").Run() })
		}, "the state in /run/podlace cannot be written | it is read-only | journalctl -k; if it shows no error of the disk: mount -o remount,rw "},
		"full": {"disk", func(l *lab) {
			l.command("mkdir", "-p", "/run/podlace")
			l.command("mount", "-t", "tmpfs", "-o", "size=64k", "none", "/run/podlace")
			l.t.Cleanup(func() { _ = exec.Command("umount", "/run/podlace").Run() })
			l.command("dd", "if=/dev/zero", "of=/run/podlace/fill", "bs=4096", "count=16")
		}, "0 of 16 blocks are free"},
		"claims without sriov": {"kubelet", func(l *lab) { l.write("run/podlace-sriov/claims/.lock", "") },
			"error no network attaches the VFs of ResourceClaims | /run/podlace-sriov/claims exists, and no configuration in "},
	}
}

// TestFindings creates one problem at a time, which the right check must report.
func TestFindings(t *testing.T) {
	for _, cases := range []map[string]breakage{conflistCases(), runtimeCases(), firewallCases(), unreadableCases(), stateCases(),
		remedyCases()} {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				l := newLab(t)
				c.spoil(&l)
				if found := l.problems(c.check); len(found) != 1 || !strings.Contains(found[0], c.want) {
					t.Errorf("found %q, want one with %q", found, c.want)
				}
			})
		}
	}
}

const statusFails = "#!/bin/sh\nif [ -n \"$CNI_COMMAND\" ]; then echo '{\"code\": 50, \"msg\": \"no room\"}'; exit 1; fi\n" +
	"echo 'CNI bridge plugin of Podlace v1' >&2\n"

func crioConf(l lab, more string) string {
	text := "[crio.network]\nnetwork_dir = \"" + l.ConfDir + "\"\n" + more
	if !strings.Contains(more, "plugin_dirs") {
		text += "plugin_dirs = [\"" + l.BinDir + "\"]\n"
	}
	return text
}

// nft adds nftables rules until the test ends.
func (l lab) nft(rules string) {
	l.t.Helper()
	l.t.Cleanup(func() { _ = exec.Command("nft", "flush", "ruleset").Run() })
	l.command("nft", rules)
}

func (l lab) bridge(name string, mtu int) {
	l.t.Helper()
	host, err := kernel.Host()
	if err == nil {
		defer host.Close()
		err = host.AddBridge(name, nil, mtu, false, false)
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = exec.Command("ip", "link", "del", name).Run() })
}

// status writes podlace-node's status file.
func (l lab) status(text string) { l.machine(agentStatusFile, text) }

func (l lab) lease(address string) {
	l.machine("/var/lib/cni/networks/pods/"+address, "container\r\neth0")
}

// machine writes a file below the test's own /run or /var until the test ends.
func (l lab) machine(path, text string) {
	l.t.Helper()
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err == nil {
		err = os.WriteFile(path, []byte(text), 0o600)
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { os.Remove(path) })
}

// TestAccepted: a rule with the bridge's name, or with a prefix of it, accepts the bridge's packets.
func TestAccepted(t *testing.T) {
	for _, match := range []string{"iifname cnidoc accept", `iifname "cni*" accept`, "jump more; }; chain more { oifname cnidoc accept"} {
		l := newLab(t)
		l.nft("table inet foreign { chain more { }; chain forward { type filter hook forward priority 0; policy drop; " + match + "; }; }")
		if found := l.problems("forward-policy"); len(found) > 0 {
			t.Errorf("%s: %q", match, found)
		}
	}
}

// TestRemedies: a finding is gone after Fix has applied its remedy.
func TestRemedies(t *testing.T) {
	for check, spoil := range map[string]func(*lab){
		"conflist": func(l *lab) { os.Chmod(l.ConfDir+"/10-podlace.conflist", 0o662) },
		"router-advertisements": func(l *lab) {
			l.advertised("lan5")
			l.sysctl("ipv6/conf/all/forwarding", "1")
			l.sysctl("ipv6/conf/lan5/accept_ra", "1")
		},
	} {
		l := newLab(t)
		spoil(&l)
		found, err := Examine(l.Options, check)
		if err != nil || len(found) != 1 || !found[0].Fixable {
			t.Fatalf("%s: %+v, %v", check, found, err)
		}
		if err := found[0].Fix(); err != nil {
			t.Fatal(err)
		}
		if left := l.problems(check); len(left) > 0 {
			t.Errorf("%s: still %q", check, left)
		}
	}
}

// TestUnusedVLANs: a kernel without VLANs on bridges is reported only if a network needs them, or if there is no network yet.
func TestUnusedVLANs(t *testing.T) {
	l := newLab(t)
	look := func() bool {
		return strings.Contains(strings.Join(l.problems("kernel-features"), ""), "VLANs on bridges")
	}
	if look() {
		t.Error("no network has a VLAN")
	}
	l.write("net.d/10-podlace.conflist", strings.Replace(ours, `"isGateway"`, `"vlan": 7, "isGateway"`, 1))
	lacks := look()
	os.RemoveAll(l.ConfDir)
	if before := look(); before != lacks {
		t.Errorf("reported with a VLAN: %v, before the first network: %v", lacks, before)
	}
	kerneltest.Feature(t, !lacks, "VLANs on bridges")
}

// TestNoUplink: without a default route, no bridge has too large an MTU.
func TestNoUplink(t *testing.T) {
	l := newLab(t)
	l.bridge("cnidoc", 9000)
	if found := l.problems("mtu"); len(found) > 0 {
		t.Errorf("%q", found)
	}
}
