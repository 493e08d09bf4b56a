// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// Fixture is a host with two pods, whose names are also their container IDs: Attached, which tests must not change, and Fresh, which has no
// network yet. Names differ between tests, so that none depends on another's leftovers.
type Fixture struct {
	Attached *sandbox.Pod
	Fresh    *sandbox.Pod
	Oracle   *Oracle

	chainPod *sandbox.Pod    // the pod that chained plugins change: attached, or fresh during a life
	Prev     json.RawMessage // the bridge's result for chainPod
}

// NewFixture attaches the first pod, which creates the state that all pods share, and takes the snapshot to which later states are
// compared.
func NewFixture(t *testing.T, plugin string) *Fixture {
	t.Helper()
	Need(t, "bridge", "host-local", plugin)
	word := regexp.MustCompile(`[^a-z0-9.]+`).ReplaceAllString(strings.ToLower(t.Name()), "-")
	f := &Fixture{Attached: NewPod(t, word+"-attached"), Fresh: NewPod(t, word+"-fresh")}
	add := NewCall("ADD", "bridge", f.Attached, f.Attached.Name, BridgeConf())
	f.chainPod, f.Prev = f.Attached, json.RawMessage(add.Run(t).OK(t).Stdout)
	t.Cleanup(func() {
		add.With("CNI_COMMAND", "DEL").Run(t).OK(t)
		add.With("CNI_COMMAND", "DEL", "CNI_CONTAINERID", f.Fresh.Name, "CNI_NETNS", f.Fresh.Path).Run(t) // remove the leftovers of a failed test
	})
	f.Life(t, plugin, func() {
		f.Good("ADD", plugin).Run(t).OK(t)
		f.Good("DEL", plugin).Run(t).OK(t)
	})
	f.Oracle = Watch(t, f.Attached, f.Fresh)
	return f
}

// BridgeConf returns the configuration of the bridge plugin in all table-driven tests.
func BridgeConf() Object {
	return Object{
		"cniVersion": "1.1.0", "name": "table", "type": "bridge", "bridge": "table0", "isGateway": true,
		"ipam": map[string]any{"type": "host-local", "ranges": []any{[]any{map[string]any{"subnet": "10.70.0.0/24"}}}},
	}
}

// Conf returns a valid configuration of a plugin, for a chained one with the result of bridge as prevResult.
func (f *Fixture) Conf(plugin string) Object {
	switch plugin {
	case "bridge":
		return BridgeConf()
	case "podlace-pod":
		return BridgeConf().With("type", plugin, "portmap.backend", "nftables", "capabilities.portMappings", true, "capabilities.bandwidth", true,
			"runtimeConfig.portMappings", Ports(Port(8080, 80, "tcp")), "runtimeConfig.bandwidth", bandwidthConf())
	case "host-local", "loopback":
		return BridgeConf().With("type", plugin, "bridge", nil, "isGateway", nil)
	}
	c := Object{"cniVersion": "1.1.0", "name": "table", "type": plugin, "prevResult": f.Prev}
	if plugin == "portmap" {
		return c.With("backend", "nftables", "capabilities.portMappings", true, "runtimeConfig.portMappings", Ports(Port(8080, 80, "tcp")))
	}
	return c.With("capabilities.bandwidth", true, "runtimeConfig.bandwidth", bandwidthConf())
}

func bandwidthConf() Object { return Object{"ingressRate": 20_000_000, "ingressBurst": 2_000_000} }

// Ports returns the value of the key portMappings with the given port mappings.
func Ports(list ...any) []any { return list }

// Port returns one port mapping.
func Port(host, container, protocol any) map[string]any {
	return map[string]any{"hostPort": host, "containerPort": container, "protocol": protocol}
}

// Chained reports whether a plugin runs after bridge.
func Chained(plugin string) bool { return plugin == "portmap" || plugin == "bandwidth" }

// Life calls do, which runs ADD and DEL of a plugin for f.Fresh. For a chained plugin, ADD and DEL of bridge surround it. Only both DELs
// together remove all state.
func (f *Fixture) Life(t *testing.T, plugin string, do func()) {
	t.Helper()
	if !Chained(plugin) {
		do()
		return
	}
	add := NewCall("ADD", "bridge", f.Fresh, f.Fresh.Name, BridgeConf())
	pod, prev := f.chainPod, f.Prev
	f.chainPod, f.Prev = f.Fresh, json.RawMessage(add.Run(t).OK(t).Stdout)
	defer func() {
		add.With("CNI_COMMAND", "DEL").Run(t).OK(t)
		f.chainPod, f.Prev = pod, prev
	}()
	do()
}

// Good returns a plugin call with a valid configuration and a complete environment.
func (f *Fixture) Good(verb, plugin string) Call {
	conf := f.Conf(plugin)
	if verb == "GC" {
		conf["cni.dev/valid-attachments"] = []any{map[string]any{"containerID": f.Attached.Name, "ifname": "eth0"}}
	}
	if verb == "CHECK" {
		conf["prevResult"] = f.Prev
	}
	if Chained(plugin) {
		return NewCall(verb, plugin, f.chainPod, f.chainPod.Name, conf)
	}
	return NewCall(verb, plugin, f.Fresh, f.Fresh.Name, conf)
}

// Config returns a copy of the call with another configuration.
func (c Call) Config(conf any) Call {
	c.Stdin = Encode(conf)
	return c
}

// ForEach runs a test for each plugin in the tested folder, or for podlace-pod in its form.
func ForEach(t *testing.T, table func(t *testing.T, f *Fixture, plugin string)) {
	plugins := AllPlugins()
	if formPod() {
		plugins = ChainPlugins()
	}
	for _, plugin := range plugins {
		t.Run(plugin, func(t *testing.T) {
			table(t, NewFixture(t, plugin), plugin)
		})
	}
}
