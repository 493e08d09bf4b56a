// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestRuntimeRates (C-111, S-14): ADD succeeds with what runtimes send: bursts of 2^32-1 bits (containerd), 2^31-1 bits (an old kubelet)
// and 2^35-9 bits (CRI-O), and rates that the kubelet permits (1k to 1P), and lower and higher ones.
func TestRuntimeRates(t *testing.T) {
	f := harness.NewFixture(t, "bandwidth")
	for _, burst := range []int64{1<<31 - 1, 1<<32 - 1, 1<<35 - 9} {
		for _, rate := range []uint64{1, 7, 1e3, 8e3, 1e6, 1e9, 1e12, 1e15, 1 << 63, 1<<64 - 1} {
			limits := map[string]any{"ingressRate": rate, "ingressBurst": burst, "egressRate": rate, "egressBurst": burst}
			lifeOf(t, f, fmt.Sprintf("rate %d burst %d", rate, burst), "bandwidth", "runtimeConfig.bandwidth", limits)
		}
	}
	for _, limits := range []map[string]any{
		{}, {"ingressRate": 1e6, "ingressBurst": 1<<32 - 1}, {"egressRate": 1e6, "egressBurst": 1<<32 - 1},
		{"ingressRate": 0, "ingressBurst": 0, "egressRate": 1e6, "egressBurst": 1<<32 - 1},
		{"ingressRate": 1e6}, {"ingressBurst": 1<<32 - 1}, {"ingressRate": 1 << 62, "ingressBurst": 1<<32 - 1},
		{"ingressRate": 1, "ingressBurst": 1},
		{"ingressRate": 1e6, "ingressBurst": 7, "egressRate": 1e6, "egressBurst": 11_999},
	} {
		lifeOf(t, f, fmt.Sprint(limits), "bandwidth", "runtimeConfig.bandwidth", limits)
	}
	lifeOf(t, f, "no runtimeConfig", "bandwidth", "runtimeConfig", nil)
}

// TestRuntimePorts uses the port mappings that runtimes send.
func TestRuntimePorts(t *testing.T) {
	f := harness.NewFixture(t, "portmap")
	lists := map[string][]any{
		"none": {}, "lowest and highest": {harness.Port(1, 65535, "tcp"), harness.Port(65535, 1, "udp")},
		"one port, three protocols": {harness.Port(53, 53, "tcp"), harness.Port(53, 53, "udp"), harness.Port(53, 53, "sctp")},
		"twice the same":            {harness.Port(80, 80, "tcp"), harness.Port(80, 80, "tcp")},
	}
	for _, protocol := range []string{"tcp", "TCP", "Tcp", "udp", "UDP", "sctp", "SCTP"} {
		lists["protocol "+protocol] = []any{harness.Port(8080, 80, protocol)}
	}
	for _, ip := range []string{"", "0.0.0.0", "::", "127.0.0.1", "10.70.0.1", "fd00::1"} {
		p := harness.Port(8080, 80, "tcp")
		p["hostIP"] = ip
		lists["hostIP "+ip] = []any{p}
	}
	var many []any
	for i := range 100 {
		many = append(many, harness.Port(20_000+i, 80, "tcp"))
	}
	lists["a hundred"] = many
	for title, list := range harness.InOrder(lists) {
		lifeOf(t, f, title, "portmap", "runtimeConfig.portMappings", list)
	}
	lifeOf(t, f, "no runtimeConfig", "portmap", "runtimeConfig", nil)
}

// lifeOf runs ADD, CHECK and DEL with a changed configuration.
func lifeOf(t *testing.T, f *harness.Fixture, title, plugin string, edit ...any) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		t.Helper()
		f.Life(t, plugin, func() {
			t.Helper()
			conf := f.Conf(plugin).With(edit...)
			added := f.Good("ADD", plugin).Config(conf).Run(t).OK(t)
			f.Good("CHECK", plugin).Config(conf.With("prevResult", harness.RawObject(t, added.Stdout))).Run(t).OK(t)
			f.Good("DEL", plugin).Config(conf).Run(t).OK(t)
		})
		f.Oracle.Clean(t, title)
	})
}
