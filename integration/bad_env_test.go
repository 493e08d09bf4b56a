// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/sandbox"
)

// Codes of the CNI specification, section "Error", and of docs/ARCHITECTURE.md.
const (
	codeVersion   = 1
	codeEnv       = 4
	codeDiffers   = 100
	codeExhausted = 101
	codeTaken     = 102
	codeIO        = 5
	codeDecode    = 6
	codeConfig    = 7
	codeNetns     = 8
	codeTryAgain  = 11
)

// TestBadEnvMissing leaves out each required variable, and each pair of them.
func TestBadEnvMissing(t *testing.T) {
	required := map[string][]string{
		"ADD":   {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"},
		"CHECK": {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"},
		"DEL":   {"CNI_CONTAINERID", "CNI_IFNAME"},
		"GC":    {"CNI_PATH"},
	}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for verb, names := range inOrder(required) {
			for i, a := range names {
				for _, b := range names[i:] {
					missing := slices.Compact([]string{a, b})
					f.mustNameMissing(t, f.good(verb, plugin), missing, names)
				}
			}
		}
	})
}

func (f *fixture) mustNameMissing(t *testing.T, c call, missing, required []string) {
	t.Helper()
	title := c.verb() + " without " + strings.Join(missing, " and ")
	t.Run(title, func(t *testing.T) {
		for _, name := range missing {
			c = c.with(name, "")
		}
		msg := c.run(t).refused(t, codeEnv).Msg
		for _, name := range required {
			if strings.Contains(msg, name) != slices.Contains(missing, name) {
				t.Errorf("msg %q: want it to name %v and nothing else", msg, missing)
			}
		}
		f.oracle.clean(t, title)
	})
}

// TestBadEnvOptional leaves out what the specification does not require.
func TestBadEnvOptional(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		f.lives(t, "ADD and DEL without CNI_PATH", plugin, func(c call) call { return c.with("CNI_PATH", "", "CNI_ARGS", "") })
		f.good("STATUS", plugin).with("CNI_PATH", "", "CNI_ARGS", "").run(t).ok(t)
		f.good("VERSION", plugin).with("CNI_PATH", "", "CNI_ARGS", "", "CNI_CONTAINERID", "", "CNI_IFNAME", "", "CNI_NETNS", "").run(t).ok(t)
	})
}

func TestBadEnvCommand(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for _, verb := range []string{"FOO", "add", "ADD ", "ADD\n"} {
			o := f.good("ADD", plugin).with("CNI_COMMAND", verb).run(t)
			var fail failure
			oneDocument(t, o.stdout, &fail)
			if o.exit != 1 || fail.Code != codeEnv || !strings.Contains(fail.Msg, "CNI_COMMAND") {
				t.Errorf("CNI_COMMAND %q: exit %d, %+v: want 1, code 4, CNI_COMMAND named", verb, o.exit, fail)
			}
		}
		f.oracle.clean(t, "unknown commands")
		o := f.good("ADD", plugin).with("CNI_COMMAND", "").run(t)
		if o.exit != 0 || o.stdout != "" || !strings.Contains(o.stderr, plugin) || !strings.Contains(o.stderr, "1.1.0") {
			t.Errorf("no CNI_COMMAND: exit %d stdout %q stderr %q: want 0, nothing, name and versions", o.exit, o.stdout, o.stderr)
		}
	})
}

func TestBadEnvContainerID(t *testing.T) {
	bad := []string{
		"a b", "../x", "a/b", "/", ".", "..", "-a", "_a", "ok\n", "a\x01b", "é", "a:b", "a%d", "a;b", "$(id)",
		strings.Repeat("a", 256), strings.Repeat("a", 300), strings.Repeat("a", 4096),
	}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for _, verb := range []string{"ADD", "CHECK", "DEL"} {
			for _, id := range bad {
				f.mustRefuse(t, verb+" "+short(id), f.good(verb, plugin).with("CNI_CONTAINERID", id), "CNI_CONTAINERID", codeEnv)
			}
		}
	})
}

func short(s string) string {
	if len(s) > 20 {
		return s[:8] + "..."
	}
	return s
}

func TestBadEnvIfName(t *testing.T) {
	bad := []string{
		".", "..", "a/b", "a:b", "a b", "a\tb", "a\n", "a\x01", "a\x7f", "%d", "eth%d", "all", "default",
		"sixteen-bytes-xx", strings.Repeat("\U0001F680", 5),
	}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for _, verb := range []string{"ADD", "CHECK", "DEL"} {
			for _, name := range bad {
				f.mustRefuse(t, verb+" "+name, f.good(verb, plugin).with("CNI_IFNAME", name), "CNI_IFNAME", codeEnv)
			}
		}
	})
}

// TestGoodNames holds the longest and oddest names that are allowed.
func TestGoodNames(t *testing.T) {
	f := newFixture(t, "bridge")
	for _, id := range []string{"a", "0", "A.b_c-1", strings.Repeat("a", 64), strings.Repeat("b", 65), strings.Repeat("c", 255)} {
		for _, name := range []string{"e", "fifteen-bytes-x", "eth0.100", "net1"} {
			c := f.good("ADD", "bridge").with("CNI_CONTAINERID", id, "CNI_IFNAME", name)
			c.run(t).ok(t)
			c.with("CNI_COMMAND", "DEL").run(t).ok(t)
			f.oracle.clean(t, "ADD and DEL of "+short(id)+" "+name)
		}
	}
}

// badNamespaces are paths that are no network namespace of a pod.
func badNamespaces(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mkfifo(dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	return map[string]string{
		"missing": "/run/netns/none", "a plain file": "/etc/passwd", "a folder": dir, "a fifo": dir + "/fifo",
		"a mount namespace": "/proc/self/ns/mnt", "a user namespace": "/proc/self/ns/user", "the plugin's own": "/proc/self/ns/net",
	}
}

func TestBadEnvNetns(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		if plugin == "host-local" {
			return // it never opens the namespace; by hand it is called with CNI_NETNS=/dev/null
		}
		for kind, path := range inOrder(badNamespaces(t)) {
			for _, verb := range []string{"ADD", "CHECK"} {
				c := f.good(verb, plugin).with("CNI_NETNS", path)
				f.mustRefuse(t, verb+" "+kind, c, "CNI_NETNS", codeNetns)
			}
		}
	})
}

// TestBadEnvNetnsDel attaches a pod and then takes it away by a path that is no
// namespace any more: for DEL that is the same as none.
func TestBadEnvNetnsDel(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for kind, path := range inOrder(badNamespaces(t)) {
			t.Run(kind, func(t *testing.T) {
				f.life(t, plugin, func() {
					if plugin != "loopback" { // whose work ends with the namespace alone
						f.good("ADD", plugin).run(t).ok(t)
					}
					f.good("DEL", plugin).with("CNI_NETNS", path).run(t).ok(t)
				})
				f.oracle.clean(t, "DEL with "+kind)
			})
		}
	})
}

// TestBadEnvNetnsOverride allows the plugin's own namespace on demand.
func TestBadEnvNetnsOverride(t *testing.T) {
	need(t, "loopback")
	node := newPod(t, "override-node")
	conf := object{"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}
	for value, allowed := range map[string]bool{"1": true, "true": true, "TRUE": true, "": false, "0": false, "false": false} {
		c := newCall("ADD", "loopback", node, "own", conf).with("CNI_NETNS_OVERRIDE", value)
		c.in = node
		before := watch(t, node)
		o := c.run(t)
		if !allowed {
			o.refused(t, codeNetns)
			before.clean(t, "override "+value)
			continue
		}
		o.ok(t)
		c.with("CNI_COMMAND", "DEL").run(t).ok(t)
	}
	downByDel(t, node, conf)
}

// downByDel shows that DEL without the override leaves the node's own lo alone.
func downByDel(t *testing.T, node *sandbox.Pod, conf object) {
	t.Helper()
	newCall("ADD", "loopback", node, "node", conf).run(t).ok(t)
	before := watch(t, node)
	del := newCall("DEL", "loopback", node, "own", conf)
	del.in = node
	del.run(t).ok(t)
	before.clean(t, "DEL in the plugin's own namespace")
}

// readsArgs reports whether the arguments mean something to a plugin. The reference's plugins of the other names ignore them.
func readsArgs(plugin string) bool { return plugin == "bridge" || plugin == "host-local" }

func TestBadEnvArgs(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for _, args := range []string{"X=y", "K8S_POD_NAME=a;bogus=1", "IgnoreUnknown=0;X=y", "none"} {
			if readsArgs(plugin) {
				f.mustRefuse(t, args, f.good("ADD", plugin).with("CNI_ARGS", args), "CNI_ARGS", codeEnv)
				continue
			}
			f.lives(t, "CNI_ARGS "+args, plugin, func(c call) call { return c.with("CNI_ARGS", args) })
		}
		for _, args := range []string{
			"IgnoreUnknown=1;X=y", "X=y;IgnoreUnknown=true", "IgnoreUnknown=True", "IgnoreUnknown=1;a=b=c", "IgnoreUnknown=1;",
			"IgnoreUnknown=1;bare", "IgnoreUnknown=1;CommonArgs=1", "IgnoreUnknown=1;X=y;X=z", "IgnoreUnknown=1;;X=",
			"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=x",
		} {
			f.lives(t, "CNI_ARGS "+args, plugin, func(c call) call { return c.with("CNI_ARGS", args) })
		}
		for _, args := range []string{"X=y", "bare", "a=b=c", ";"} {
			f.good("DEL", plugin).with("CNI_ARGS", args).run(t).ok(t)
		}
		f.oracle.clean(t, "DEL with odd CNI_ARGS")
	})
}
