// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestBadEnvMissing first omits each single required variable, and then each pair of required variables.
func TestBadEnvMissing(t *testing.T) {
	required := map[string][]string{
		"ADD":   {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"},
		"CHECK": {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"},
		"DEL":   {"CNI_CONTAINERID", "CNI_IFNAME"},
		"GC":    {"CNI_PATH"},
	}
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for verb, names := range harness.InOrder(required) {
			for i, a := range names {
				for _, b := range names[i:] {
					missing := slices.Compact([]string{a, b})
					mustNameMissing(t, f, f.Good(verb, plugin), missing, names)
				}
			}
		}
	})
}

func mustNameMissing(t *testing.T, f *harness.Fixture, c harness.Call, missing, required []string) {
	t.Helper()
	title := c.Verb() + " without " + strings.Join(missing, " and ")
	t.Run(title, func(t *testing.T) {
		for _, name := range missing {
			c = c.With(name, "")
		}
		msg := c.Run(t).Refused(t, harness.CodeEnv).Msg
		for _, name := range required {
			if strings.Contains(msg, name) != slices.Contains(missing, name) {
				t.Errorf("msg %q: want it to name %v and nothing else", msg, missing)
			}
		}
		f.Oracle.Clean(t, title)
	})
}

func TestBadEnvOptional(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		runLife(t, f, "ADD and DEL without CNI_PATH", plugin, func(c harness.Call) harness.Call { return c.With("CNI_PATH", "", "CNI_ARGS", "") })
		f.Good("STATUS", plugin).With("CNI_PATH", "", "CNI_ARGS", "").Run(t).OK(t)
		f.Good("VERSION", plugin).With("CNI_PATH", "", "CNI_ARGS", "", "CNI_CONTAINERID", "", "CNI_IFNAME", "", "CNI_NETNS", "").Run(t).OK(t)
	})
}

func TestBadEnvCommand(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for _, verb := range []string{"FOO", "add", "ADD ", "ADD\n"} {
			o := f.Good("ADD", plugin).With("CNI_COMMAND", verb).Run(t)
			var fail harness.Failure
			harness.OneDocument(t, o.Stdout, &fail)
			if o.Exit != 1 || fail.Code != harness.CodeEnv || !strings.Contains(fail.Msg, "CNI_COMMAND") {
				t.Errorf("CNI_COMMAND %q: exit %d, %+v: want 1, code 4, CNI_COMMAND named", verb, o.Exit, fail)
			}
		}
		f.Oracle.Clean(t, "unknown commands")
		o := f.Good("ADD", plugin).With("CNI_COMMAND", "").Run(t)
		if o.Exit != 0 || o.Stdout != "" || !strings.Contains(o.Stderr, plugin) || !strings.Contains(o.Stderr, "1.1.0") {
			t.Errorf("no CNI_COMMAND: exit %d stdout %q stderr %q: want 0, nothing, name and versions", o.Exit, o.Stdout, o.Stderr)
		}
	})
}

func TestBadEnvContainerID(t *testing.T) {
	bad := []string{
		"a b", "../x", "a/b", "/", ".", "..", "-a", "_a", "ok\n", "a\x01b", "é", "a:b", "a%d", "a;b", "$(id)",
		strings.Repeat("a", 256), strings.Repeat("a", 300), strings.Repeat("a", 4096),
	}
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for i, id := range bad {
			for _, verb := range harness.OneOf([]string{"ADD", "CHECK", "DEL"}, i+len(plugin)) {
				mustRefuse(t, f, verb+" "+short(id), f.Good(verb, plugin).With("CNI_CONTAINERID", id), "CNI_CONTAINERID", harness.CodeEnv)
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
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for i, name := range bad {
			for _, verb := range harness.OneOf([]string{"ADD", "CHECK", "DEL"}, i+len(plugin)) {
				mustRefuse(t, f, verb+" "+name, f.Good(verb, plugin).With("CNI_IFNAME", name), "CNI_IFNAME", harness.CodeEnv)
			}
		}
	})
}

// TestGoodNames uses the longest and most unusual names that are allowed.
func TestGoodNames(t *testing.T) {
	f := harness.NewFixture(t, "bridge")
	for _, id := range []string{"a", "0", "A.b_c-1", strings.Repeat("a", 64), strings.Repeat("b", 65), strings.Repeat("c", 255)} {
		for _, name := range []string{"e", "fifteen-bytes-x", "eth0.100", "net1"} {
			c := f.Good("ADD", "bridge").With("CNI_CONTAINERID", id, "CNI_IFNAME", name)
			c.Run(t).OK(t)
			c.With("CNI_COMMAND", "DEL").Run(t).OK(t)
			f.Oracle.Clean(t, "ADD and DEL of "+short(id)+" "+name)
		}
	}
}

// badNamespaces returns paths that do not lead to the network namespace of a pod.
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
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		if plugin == "host-local" {
			return // host-local never opens the namespace, and manual calls pass CNI_NETNS=/dev/null
		}
		for kind, path := range harness.InOrder(badNamespaces(t)) {
			for _, verb := range []string{"ADD", "CHECK"} {
				c := f.Good(verb, plugin).With("CNI_NETNS", path)
				mustRefuse(t, f, verb+" "+kind, c, "CNI_NETNS", harness.CodeNetns)
			}
		}
	})
}

// TestBadEnvNetnsDel: after an ADD, DEL with a netns path that is no pod's namespace works as if CNI_NETNS were empty.
func TestBadEnvNetnsDel(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for kind, path := range harness.InOrder(badNamespaces(t)) {
			t.Run(kind, func(t *testing.T) {
				f.Life(t, plugin, func() {
					if plugin != "loopback" { // loopback's state ends with the namespace
						f.Good("ADD", plugin).Run(t).OK(t)
					}
					f.Good("DEL", plugin).With("CNI_NETNS", path).Run(t).OK(t)
				})
				f.Oracle.Clean(t, "DEL with "+kind)
			})
		}
	})
}

// TestBadEnvNetnsOverride: loopback accepts the node's own namespace only if CNI_NETNS_OVERRIDE is set.
func TestBadEnvNetnsOverride(t *testing.T) {
	harness.Need(t, "loopback")
	node := harness.NewPod(t, "override-node")
	conf := object{"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}
	for value, allowed := range map[string]bool{"1": true, "true": true, "TRUE": true, "": false, "0": false, "false": false} {
		c := harness.NewCall("ADD", "loopback", node, "own", conf).With("CNI_NETNS_OVERRIDE", value)
		c.In = node
		before := harness.Watch(t, node)
		o := c.Run(t)
		if !allowed {
			o.Refused(t, harness.CodeNetns)
			before.Clean(t, "override "+value)
			continue
		}
		o.OK(t)
		c.With("CNI_COMMAND", "DEL").Run(t).OK(t)
	}
	checkOwnLo(t, node, conf)
}

// checkOwnLo checks that DEL without the override does not change lo in the node's own namespace.
func checkOwnLo(t *testing.T, node *sandbox.Pod, conf object) {
	t.Helper()
	harness.NewCall("ADD", "loopback", node, "node", conf).Run(t).OK(t)
	before := harness.Watch(t, node)
	del := harness.NewCall("DEL", "loopback", node, "own", conf)
	del.In = node
	del.Run(t).OK(t)
	before.Clean(t, "DEL in the plugin's own namespace")
}

// readsArgs reports whether the plugin or a part of it evaluates CNI_ARGS. Like the reference plugins, all but bridge and host-local ignore
// it.
func readsArgs(name string) bool { return plugin.Runs(name, "bridge") || name == "host-local" }

func TestBadEnvArgs(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for _, args := range []string{"X=y", "K8S_POD_NAME=a;bogus=1", "IgnoreUnknown=0;X=y", "none"} {
			if readsArgs(plugin) {
				mustRefuse(t, f, args, f.Good("ADD", plugin).With("CNI_ARGS", args), "CNI_ARGS", harness.CodeEnv)
				continue
			}
			runLife(t, f, "CNI_ARGS "+args, plugin, func(c harness.Call) harness.Call { return c.With("CNI_ARGS", args) })
		}
		for _, args := range []string{
			"IgnoreUnknown=1;X=y", "X=y;IgnoreUnknown=true", "IgnoreUnknown=True", "IgnoreUnknown=1;a=b=c", "IgnoreUnknown=1;",
			"IgnoreUnknown=1;bare", "IgnoreUnknown=1;CommonArgs=1", "IgnoreUnknown=1;X=y;X=z", "IgnoreUnknown=1;;X=",
			"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=x",
		} {
			runLife(t, f, "CNI_ARGS "+args, plugin, func(c harness.Call) harness.Call { return c.With("CNI_ARGS", args) })
		}
		for _, args := range []string{"X=y", "bare", "a=b=c", ";"} {
			f.Good("DEL", plugin).With("CNI_ARGS", args).Run(t).OK(t)
		}
		f.Oracle.Clean(t, "DEL with odd CNI_ARGS")
	})
}
