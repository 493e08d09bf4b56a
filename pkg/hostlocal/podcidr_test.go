// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
)

// writeNode writes a file below /run of the sandbox, and removes it when the test ends.
func writeNode(t testing.TB, path, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(path) })
}

const flannel = "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.3.1/24\nFLANNEL_IPV6_NETWORK=fd42::/48\nFLANNEL_IPV6_SUBNET=fd42:0:0:3::1/64\nFLANNEL_MTU=1450\n"

func TestPodCIDR(t *testing.T) {
	const both = `"ranges":[[{"subnet":"usePodCidr"}],[{"subnet":"usePodCidrIPv6"}]]`
	for _, c := range []struct {
		what, node, flannel string
		ipam                string
		want                string // expected sets, or part of the error
	}{
		{"both families", `{"podCIDRs":["10.1.2.0/24","fd00:1::/64"]}`, "", both, "10.1.2.1-10.1.2.254 fd00:1::1-fd00:1::ffff:ffff:ffff:ffff"},
		{"IPv6 first", `{"podCIDRs":["fd00:1::/120","10.1.2.0/24"]}`, "", both, "10.1.2.1-10.1.2.254 fd00:1::1-fd00:1::ff"},
		{"flat", `{"podCIDRs":["10.1.2.0/24","fd00:1::/64"]}`, "", `"subnet":"usePodCidr"`, "10.1.2.1-10.1.2.254"},
		{"flat IPv6", `{"podCIDRs":["10.1.2.0/24","fd00:1::/120"]}`, "", `"subnet":"usePodCidrIPv6"`, "fd00:1::1-fd00:1::ff"},
		{"any case", `{"podCIDRs":["10.1.2.0/24"]}`, "", `"subnet":"USEPODCIDR"`, "10.1.2.1-10.1.2.254"},
		{"IPv6 alone", `{"podCIDRs":["fd00:1::/120"]}`, "", `"subnet":"usePodCidr"`, "fd00:1::1-fd00:1::ff"},
		{"first of its family", `{"podCIDRs":["10.1.2.0/24","10.9.2.0/24"]}`, "", `"subnet":"usePodCidr"`, "10.1.2.1-10.1.2.254"},
		{"beside a subnet", `{"podCIDRs":["10.1.2.0/24"]}`, "",
			`"ranges":[[{"subnet":"usePodCidr","rangeStart":"10.1.2.9"},{"subnet":"10.2.0.0/30"}]]`, "10.1.2.9-10.1.2.254,10.2.0.1-10.2.0.2"},
		{"flannel", "", flannel, both, "10.42.3.1-10.42.3.254 fd42:0:0:3::1-fd42::3:ffff:ffff:ffff:ffff"},
		{"quoted", "", `FLANNEL_SUBNET="10.42.3.1/24"` + "\r\n", `"subnet":"usePodCidr"`, "10.42.3.1-10.42.3.254"},
		{"node.json before flannel", `{"podCIDRs":["10.1.2.0/24"]}`, flannel, `"subnet":"usePodCidr"`, "10.1.2.1-10.1.2.254"},

		{"both words, IPv4 alone", `{"podCIDRs":["10.1.2.0/24"]}`, "", both, "10.1.2.1-10.1.2.254"},
		{"both words, IPv6 alone", `{"podCIDRs":["fd00:1::/120"]}`, "", both, "fd00:1::1-fd00:1::ff"},
		{"both words, flannel", "", "FLANNEL_SUBNET=10.42.3.1/24", both, "10.42.3.1-10.42.3.254"},
		{"both words, flat and in a set", `{"podCIDRs":["fd00:1::/120"]}`, "",
			`"subnet":"usePodCidr","rangeStart":"10.1.2.9","ranges":[[{"subnet":"usePodCidrIPv6"},{"subnet":"fd00:2::/120"}]]`,
			"fd00:1::1-fd00:1::ff,fd00:2::1-fd00:2::ff"},
		{"both words, one in a set with a subnet", `{"podCIDRs":["fd00:1::/120"]}`, "",
			`"ranges":[[{"subnet":"usePodCidr"},{"subnet":"10.9.0.0/30"}],[{"subnet":"usePodCidrIPv6"}]]`, "10.9.0.1-10.9.0.2 fd00:1::1-fd00:1::ff"},

		{"no file", "", "", both, "neither /run/podlace/node.json nor /run/flannel/subnet.env exists"},
		{"no IPv6", `{"podCIDRs":["10.1.2.0/24"]}`, "", `"subnet":"usePodCidrIPv6"`, "/run/podlace/node.json has no IPv6 CIDR"},
		{"no IPv4 beside another range", `{"podCIDRs":["fd00:1::/64"]}`, "", `"subnet":"usePodCidrIPv6","ranges":[[{"subnet":"usePodCidrIPv6"}]]`,
			"overlap"},
		{"no IPv6 in flannel", "", "FLANNEL_SUBNET=10.42.3.1/24", `"subnet":"usePodCidrIPv6"`, "/run/flannel/subnet.env has no IPv6 CIDR"},
		{"empty", " ", flannel, both, "/run/podlace/node.json: want {"},
		{"no CIDR yet", `{"podCIDRs":}`, "", both, "/run/podlace/node.json: want {"},
		{"empty list", `{"podCIDRs":[]}`, "", both, "with at least one CIDR"},
		{"a word", `{"podCIDRs":["pods"]}`, "", both, `/run/podlace/node.json: podCIDRs: "pods" is no CIDR`},
		{"a word in flannel", "", "FLANNEL_SUBNET=x", both, `/run/flannel/subnet.env: FLANNEL_SUBNET "x" is no CIDR`},
		{"nothing in flannel", "", "FLANNEL_MTU=1450", both, "has neither FLANNEL_SUBNET nor"},
		{"large", strings.Repeat(" ", 64<<10+1), "", both, "larger than 65536 bytes"},
		{"host bits", `{"podCIDRs":["10.1.2.1/24"]}`, "", `"subnet":"usePodCidr"`,
			"/run/podlace/node.json: ipam subnet 10.1.2.1/24: has host bits set, want 10.1.2.0/24"},
		{"loopback", `{"podCIDRs":["127.0.0.0/8"]}`, "", `"subnet":"usePodCidr"`,
			"/run/podlace/node.json: ipam subnet 127.0.0.0/8: has no addresses for pods"},
		{"mapped", `{"podCIDRs":["::ffff:10.1.2.0/120"]}`, "", `"subnet":"usePodCidr"`,
			"/run/podlace/node.json: ipam subnet ::ffff:10.1.2.0/120: is an IPv4-mapped"},
		{"loopback in flannel", "", "FLANNEL_SUBNET=127.0.0.1/8", `"subnet":"usePodCidr"`,
			"/run/flannel/subnet.env: ipam subnet 127.0.0.0/8: has no"},
		{"symbolic link in flannel", "", "-> /etc/hostname", both, `"/run/flannel/subnet.env" is a symbolic link: want a regular file`},
		{"symbolic link", "-> /etc/hostname", "", both, `"/run/podlace/node.json" is a symbolic link: want a regular file`},
	} {
		t.Run(c.what, func(t *testing.T) {
			for file, content := range map[string]string{nodefile.Path: c.node, nodefile.FlannelPath: c.flannel} {
				if target, link := strings.CutPrefix(content, "-> "); link {
					writeNode(t, file, "") // creates the folder, and removes it when the test ends
					if err := errors.Join(os.Remove(file), os.Symlink(target, file)); err != nil {
						t.Fatal(err)
					}
				} else if content != "" {
					writeNode(t, file, content)
				}
			}
			cfg, err := parsed(`{"ipam":{`+c.ipam+`}}`, nil)
			if err != nil {
				if plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v, want %q", err, c.want)
				}
				return
			}
			if diff := cmp.Diff(strings.Fields(c.want), cfg.texts()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// usePodCidr and usePodCidrIPv6 also work in ranges from the runtime.
func TestPodCIDRFromRuntime(t *testing.T) {
	writeNode(t, nodefile.Path, `{"podCIDRs":["10.1.2.0/24"]}`)
	cfg, err := parsed(`{"ipam":{},"runtimeConfig":{"ipRanges":[[{"subnet":"usePodCidr"}]]}}`, nil)
	if err != nil || cfg.texts()[0] != "10.1.2.1-10.1.2.254" {
		t.Errorf("got %v, %v", cfg.texts(), err)
	}
}

// The file with the CIDRs is read only if it is regular: a pipe, for example, could block.
func TestPodCIDRFileIsHardened(t *testing.T) {
	target := filepath.Join(t.TempDir(), "target")
	writeNode(t, target, `{"podCIDRs":["10.1.2.0/24"]}`)
	for what, place := range map[string]func() error{
		"symbolic link": func() error { return os.Symlink(target, nodefile.Path) },
		"FIFO":          func() error { return unix.Mkfifo(nodefile.Path, 0o600) },
		"folder":        func() error { return os.Mkdir(nodefile.Path, 0o700) },
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(nodefile.Path), 0o700), place()); err != nil {
			t.Fatal(err)
		}
		if _, err := parsed(`{"ipam":{"subnet":"usePodCidr"}}`, nil); plugin.Code(err) != plugin.CodeConfig ||
			!strings.Contains(err.Error(), nodefile.Path) {
			t.Errorf("%s: %v", what, err)
		}
		if err := os.Remove(nodefile.Path); err != nil {
			t.Fatal(err)
		}
	}
}

// Without the file with the node's CIDRs, ADD fails and the other CNI commands succeed.
func TestVerbsWithoutPodCIDR(t *testing.T) {
	l := newLab(t, `"subnet":"usePodCidr"`)
	writeNode(t, nodefile.Path, `{"podCIDRs":["10.1.2.0/24"]}`)
	l.mustGive("a", "10.1.2.2/24")
	l.mustGive("b", "10.1.2.3/24")
	l.mustGive("c", "10.1.2.4/24")
	l.ok(l.call("STATUS", "", ""))
	if err := os.Remove(nodefile.Path); err != nil {
		t.Fatal(err)
	}
	for verb, code := range map[string]uint{"ADD": plugin.CodeConfig, "STATUS": plugin.CodeNotAvailable} {
		a := l.call(verb, "d", "")
		l.mustFail(a, code, "neither /run/podlace/node.json nor")
		if !strings.Contains(a.Detail, "kubectl get node NODE -o jsonpath=") {
			t.Errorf("%s has no hint: %s", verb, a.Detail)
		}
	}
	l.ok(l.call("CHECK", "a", prev("192.0.2.7/24", "10.1.2.2/24")))
	l.mustFail(l.call("CHECK", "a", prev("10.1.2.3/24")), plugin.CodeStateDiffers, "belongs to container b,")
	l.mustFail(l.call("CHECK", "a", prev("192.0.2.7/24")), plugin.CodeStateDiffers, "no address of prevResult is leased")
	l.ok(l.call("DEL", "a", ""))
	l.age()
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[{"containerID":"c","ifname":"eth0"}]`))
	if files := l.files(); files["10.1.2.2"] != "" || files["10.1.2.3"] != "" || files["10.1.2.4"] == "" {
		t.Errorf("left %v", files)
	}
}

// The shell command in the hint of the error works on a node without /run/podlace. All its programs but kubectl are real.
func TestPodCIDRHintWorksOnFreshNode(t *testing.T) {
	if err := os.RemoveAll(filepath.Dir(nodefile.Path)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(nodefile.Path) })
	_, err := parsed(`{"ipam":{"subnet":"usePodCidr"}}`, nil)
	_, command, ok := strings.Cut(plugin.Hint(err), ": ")
	if !ok {
		t.Fatalf("no command in the hint of %v", err)
	}
	bin := t.TempDir()
	const kubectl = "#!/bin/sh\n" + `[ "$*" = 'get node NODE -o jsonpath={"{"}"podCIDRs":{.spec.podCIDRs}{"}"}' ] && echo '{"podCIDRs":["10.1.2.0/24"]}'` + "\n"
	if err := os.WriteFile(filepath.Join(bin, "kubectl"), []byte(kubectl), 0o755); err != nil {
		t.Fatal(err)
	}
	sh := exec.Command("sh", "-c", command)
	sh.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH")}
	if out, err := sh.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	if cfg, err := parsed(`{"ipam":{"subnet":"usePodCidr"}}`, nil); err != nil || cfg.texts()[0] != "10.1.2.1-10.1.2.254" {
		t.Errorf("after %s: %v, %v", command, cfg.texts(), err)
	}
}

// If the node's CIDR changes, new pods get addresses from the new one, and old pods can still be deleted.
func TestPodCIDRChanges(t *testing.T) {
	l := newLab(t, `"subnet":"usePodCidr"`)
	writeNode(t, nodefile.Path, `{"podCIDRs":["10.1.2.0/24"]}`)
	l.mustGive("a", "10.1.2.2/24")
	writeNode(t, nodefile.Path, `{"podCIDRs":["10.1.9.0/24"]}`)
	l.mustGive("b", "10.1.9.2/24")
	l.ok(l.call("DEL", "a", ""))
	if l.files()["10.1.2.2"] != "" {
		t.Error("the lease of the old CIDR is left")
	}
}
