// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestAdviceLeavesOthers: what doctor advises harms neither a later podlace-node, which replaces only its own file, nor the pods of another
// network.
func TestAdviceLeavesOthers(t *testing.T) {
	for name, c := range map[string]struct {
		check string
		spoil func(lab)
		want  string // end of the only finding
	}{
		"before the agent": {"conflist", func(l lab) {
			l.run("kubelet")
			os.Remove(l.ConfDir + "/10-podlace.conflist")
		}, "conf/10-podlace-kubernetes.conflist CONFDIR/10-podlace.conflist"},
		"no plugins": {"conflist", func(l lab) {
			os.Remove(l.ConfDir + "/10-podlace.conflist")
			os.Remove(l.BinDir + "/bridge")
		}, "| make install CNI_BIN_DIR=BINDIR; install -m 600 conf/10-podlace.conflist CONFDIR/10-podlace.conflist"},
		"another network": {"conflist", func(l lab) {
			l.write("net.d/10-podlace.conflist", l.foreign("flannel"))
		}, "otherwise docs/MOVING.md"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			c.spoil(l)
			want := strings.NewReplacer("CONFDIR", l.ConfDir, "BINDIR", l.BinDir).Replace(c.want)
			if found := l.problems(c.check); len(found) != 1 || !strings.HasSuffix(found[0], want) {
				t.Errorf("%q, want %q", found, want)
			}
		})
	}
}

// TestUnusedConflist: a configuration that the runtime does not use keeps no pod from starting, so it is no error. The finding names it.
func TestUnusedConflist(t *testing.T) {
	l := newLab(t)
	l.write("net.d/87-podman.conflist", strings.NewReplacer(`"pods"`, `"podman"`, "10.91.0.0/29", "10.88.0.0/33", "cnidoc", "cni-podman0").Replace(ours))
	found := l.problems("conflist-keys")
	if len(found) != 1 || !strings.HasPrefix(found[0], "warning "+l.ConfDir+"/87-podman.conflist:") {
		t.Errorf("%q", found)
	}
	l.write("net.d/05-cilium.conflist", l.foreign("cilium"))
	os.Remove(l.ConfDir + "/10-podlace.conflist")
	if found := l.problems("conflist"); len(found) > 0 {
		t.Errorf("beside Cilium: %q", found)
	}
}

// TestWritableFile: the remedy leaves the file's readers alone.
func TestWritableFile(t *testing.T) {
	l := newLab(t)
	kerneltest.Must(t, os.Chmod(l.ConfDir+"/10-podlace.conflist", 0o666))
	found, err := Examine(l.Options, "conflist")
	kerneltest.Must(t, err, found[0].Fix())
	if info, _ := os.Stat(l.ConfDir + "/10-podlace.conflist"); info.Mode().Perm() != 0o644 {
		t.Errorf("mode %o, command %q", info.Mode().Perm(), found[0].Command)
	}
}

// TestOldLibcni: before version 1.2, libcni's cache had no namespace. CHECK gets that of the record.
func TestOldLibcni(t *testing.T) {
	l := newLab(t)
	l.pod("web-1", ours)
	file := "/var/lib/cni/results/pods-web-1-eth0"
	text, err := os.ReadFile(file)
	kerneltest.Must(t, err)
	at := strings.Index(string(text), `"netns":"`)
	end := at + len(`"netns":"`) + strings.Index(string(text[at+len(`"netns":"`):]), `"`) + 2
	l.machine(file, string(text[:at])+string(text[end:]))
	l.checks(`[ -n "$CNI_NETNS" ] || { echo '{"code": 4, "msg": "CNI_NETNS missing"}'; exit 1; }`)
	if found := l.problems("pods"); len(found) > 0 {
		t.Errorf("%q", found)
	}
}

// TestStaticRoute: without a default route of a router advertisement, nothing is lost while the kernel ignores these.
func TestStaticRoute(t *testing.T) {
	l := newLab(t)
	l.uplink("lan8")
	l.sysctl("ipv6/conf/all/forwarding", "1")
	l.sysctl("ipv6/conf/lan8/accept_ra", "1")
	if found := l.problems("router-advertisements"); len(found) > 0 {
		t.Errorf("%q", found)
	}
}

// TestLayer2Bridge: firewalls and network managers keep their rules for a bridge of layer 2, which may hold the node's uplink.
func TestLayer2Bridge(t *testing.T) {
	l := newLab(t)
	l.write("net.d/10-podlace.conflist", strings.NewReplacer("cnidoc", "br-lan", `"isGateway": true, `, "").Replace(ours))
	l.programs("firewalld", "NetworkManager")
	l.write("etc/ufw/ufw.conf", "ENABLED=yes\n")
	l.nft("table inet foreign { chain forward { type filter hook forward priority 0; policy drop; }; }")
	if found := l.problems("forward-policy"); len(found) > 0 {
		t.Errorf("%q", found)
	}
	if found := l.problems("networkmanager"); len(found) != 1 || strings.Contains(found[0], "br-lan") {
		t.Errorf("%q", found)
	}
}

// TestLoopbackOfAgent: 'make install' would replace other projects' plugins on a node where podlace-node adds the missing loopback.
func TestLoopbackOfAgent(t *testing.T) {
	l := newLab(t)
	l.status(`{"ready": true}`)
	os.Remove(l.BinDir + "/loopback")
	if found := l.problems("binaries"); len(found) != 1 || !strings.Contains(found[0], "| podlace-node status, ") {
		t.Errorf("%q", found)
	}
}
