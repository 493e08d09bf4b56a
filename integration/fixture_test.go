// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/sandbox"
)

// fixture is one host with one attached pod, which nothing may disturb, and one
// pod that has nothing yet. Their names are the container IDs, different in every
// test so that none stumbles over what another left.
type fixture struct {
	attached *sandbox.Pod
	fresh    *sandbox.Pod
	oracle   *oracle

	chainPod *sandbox.Pod    // what chained plugins work on: attached, or fresh during a life
	prev     json.RawMessage // result of the bridge for it
}

// newFixture attaches a pod to the network that the plugin's tables use. What the
// plugin makes once and keeps for all pods exists before the oracle looks.
func newFixture(t *testing.T, plugin string) *fixture {
	t.Helper()
	need(t, "bridge", "host-local", plugin)
	word := regexp.MustCompile(`[^a-z0-9.]+`).ReplaceAllString(strings.ToLower(t.Name()), "-")
	f := &fixture{attached: newPod(t, word+"-attached"), fresh: newPod(t, word+"-fresh")}
	add := newCall("ADD", "bridge", f.attached, f.attached.Name, bridgeConf())
	f.chainPod, f.prev = f.attached, json.RawMessage(add.run(t).ok(t).stdout)
	t.Cleanup(func() {
		add.with("CNI_COMMAND", "DEL").run(t).ok(t)
		add.with("CNI_COMMAND", "DEL", "CNI_CONTAINERID", f.fresh.Name, "CNI_NETNS", f.fresh.Path).run(t) // what a failed test left
	})
	f.life(t, plugin, func() {
		f.good("ADD", plugin).run(t).ok(t)
		f.good("DEL", plugin).run(t).ok(t)
	})
	f.oracle = watch(t, f.attached, f.fresh)
	return f
}

func bridgeConf() object {
	return object{
		"cniVersion": "1.1.0", "name": "table", "type": "bridge", "bridge": "table0", "isGateway": true,
		"ipam": map[string]any{"type": "host-local", "ranges": []any{[]any{map[string]any{"subnet": "10.70.0.0/24"}}}},
	}
}

// conf is a good configuration of a plugin. The chained ones get a prevResult
// that is about the pod which is attached.
func (f *fixture) conf(plugin string) object {
	switch plugin {
	case "bridge":
		return bridgeConf()
	case "host-local", "loopback":
		return bridgeConf().with("type", plugin, "bridge", nil, "isGateway", nil)
	}
	c := object{"cniVersion": "1.1.0", "name": "table", "type": plugin, "prevResult": f.prev}
	if plugin == "portmap" {
		return c.with("backend", "nftables", "capabilities.portMappings", true, "runtimeConfig.portMappings", ports(port(8080, 80, "tcp")))
	}
	return c.with("capabilities.bandwidth", true, "runtimeConfig.bandwidth", map[string]any{"ingressRate": 20_000_000, "ingressBurst": 2_000_000})
}

func ports(list ...any) []any { return list }

func port(host, container, protocol any) map[string]any {
	return map[string]any{"hostPort": host, "containerPort": container, "protocol": protocol}
}

// chained plugins work on what the bridge made.
func chained(plugin string) bool { return plugin == "portmap" || plugin == "bandwidth" }

// life calls f, which runs ADD and DEL of a plugin on the fresh pod. For a chained
// plugin the bridge attaches the pod before and detaches it afterwards: only both
// DELs together promise that nothing is left.
func (f *fixture) life(t *testing.T, plugin string, do func()) {
	t.Helper()
	if !chained(plugin) {
		do()
		return
	}
	add := newCall("ADD", "bridge", f.fresh, f.fresh.Name, bridgeConf())
	pod, prev := f.chainPod, f.prev
	f.chainPod, f.prev = f.fresh, json.RawMessage(add.run(t).ok(t).stdout)
	defer func() {
		add.with("CNI_COMMAND", "DEL").run(t).ok(t)
		f.chainPod, f.prev = pod, prev
	}()
	do()
}

// lives runs ADD and DEL with possibly different calls, and looks for what is left.
func (f *fixture) lives(t *testing.T, title, plugin string, edit func(call) call) {
	t.Helper()
	f.life(t, plugin, func() {
		t.Helper()
		edit(f.good("ADD", plugin)).run(t).ok(t)
		edit(f.good("DEL", plugin)).run(t).ok(t)
	})
	f.oracle.clean(t, title)
}

// good is a call that succeeds.
func (f *fixture) good(verb, plugin string) call {
	conf := f.conf(plugin)
	if verb == "GC" {
		conf["cni.dev/valid-attachments"] = []any{map[string]any{"containerID": f.attached.Name, "ifname": "eth0"}}
	}
	if verb == "CHECK" {
		conf["prevResult"] = f.prev
	}
	if chained(plugin) {
		return newCall(verb, plugin, f.chainPod, f.chainPod.Name, conf)
	}
	return newCall(verb, plugin, f.fresh, f.fresh.Name, conf)
}

// config returns the call with another configuration.
func (c call) config(conf any) call {
	c.stdin = encode(conf)
	return c
}

// forEach runs a table once for every plugin that is in the folder.
func forEach(t *testing.T, table func(t *testing.T, f *fixture, plugin string)) {
	for _, plugin := range allPlugins() {
		t.Run(plugin, func(t *testing.T) {
			table(t, newFixture(t, plugin), plugin)
		})
	}
}

// mustRefuse runs one bad call and checks the error and that nothing changed.
func (f *fixture) mustRefuse(t *testing.T, title string, c call, says string, codes ...int) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		t.Helper()
		o := c.run(t)
		if o.exit == 0 && c.verb() == "ADD" {
			defer func() {
				c.with("CNI_COMMAND", "DEL").run(t)
				f.oracle.rebase(t)
			}()
		}
		fail := o.refused(t, codes...)
		if !strings.Contains(fail.Msg, says) {
			t.Errorf("msg %q does not say %q", fail.Msg, says)
		}
		f.oracle.clean(t, title)
	})
}
