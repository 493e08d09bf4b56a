// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func TestPercentile(t *testing.T) {
	times := []time.Duration{5, 1, 4, 2, 3}
	for p, want := range map[int]time.Duration{1: 1, 50: 3, 60: 3, 61: 4, 95: 5, 100: 5} {
		if got := percentile(times, p); got != want {
			t.Errorf("p%d = %d, want %d", p, got, want)
		}
	}
	if times[0] != 5 {
		t.Error("percentile sorted its argument")
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 2, 9}, 3}} {
		if got := median(c.values); got != c.want {
			t.Errorf("median(%v) = %v, want %v", c.values, got, c.want)
		}
	}
}

func TestRatioOver(t *testing.T) {
	ours := flowTrack{measured: []flowThroughput{{gigabits: 10}, {gigabits: 4}, {gigabits: 30}}}
	base := flowTrack{measured: []flowThroughput{{gigabits: 10}, {gigabits: 2}, {gigabits: 20}, {gigabits: 99}}}
	if got := ours.ratioOver(&base); got != 1.5 {
		t.Errorf("got %v, want 1.5, the middle of 1, 2 and 1.5", got)
	}
}

func TestInvocation(t *testing.T) {
	s := nftables()
	c := chain{
		folder: "/bin/cni", network: "net", id: "id", plugins: s.pluginEntries(), args: s.capabilities(true),
		pod: &sandbox.Pod{Name: "web", Path: "/run/netns/web"}, result: json.RawMessage(`{"ips":[]}`),
	}
	want := map[string][]string{"bridge": nil, "portmap": {"portMappings"}, "bandwidth": {"bandwidth"}}
	for _, p := range c.plugins {
		inv, err := c.invocation(verbAdd, p)
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			Name, CNIVersion, Type string
			PrevResult             json.RawMessage
			RuntimeConfig          map[string]any
		}
		if err := json.Unmarshal(inv.stdin, &got); err != nil {
			t.Fatal(err)
		}
		if got.Name != "net" || got.CNIVersion != cniVersion || string(got.PrevResult) != `{"ips":[]}` {
			t.Errorf("%s: stdin %s", inv.name, inv.stdin)
		}
		if inv.path != "/bin/cni/"+got.Type {
			t.Errorf("%s runs %s", got.Type, inv.path)
		}
		var keys []string
		for key := range got.RuntimeConfig {
			keys = append(keys, key)
		}
		if diff := cmp.Diff(want[inv.name], keys); diff != "" {
			t.Errorf("%s: runtimeConfig (-want +got):\n%s", inv.name, diff)
		}
		env := strings.Join(inv.env, "\n")
		for _, line := range []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=id", "CNI_NETNS=/run/netns/web", "CNI_IFNAME=eth0"} {
			if !strings.Contains(env, line) {
				t.Errorf("%s: no %s in the environment", inv.name, line)
			}
		}
	}
}

func TestOrder(t *testing.T) {
	c := chain{plugins: nftables().pluginEntries()}
	for verb, want := range map[string]string{verbAdd: "bridge", verbCheck: "bridge", verbDel: "bandwidth"} {
		if got := c.orderedPlugins(verb)[0]["type"]; got != want {
			t.Errorf("%s starts with %v, want %s", verb, got, want)
		}
	}
	if c.plugins[0]["type"] != "bridge" {
		t.Error("DEL reversed the chain itself")
	}
}

func TestTraced(t *testing.T) {
	inv := invocation{path: "/bin/sh", env: []string{"PATH=/usr/bin:/bin"}, stdin: []byte("env true\n(true; env false)\necho out\n")}
	out, got, err := inv.runTraced()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("strace is not installed")
	}
	if err != nil && strings.Contains(err.Error(), "Operation not permitted") {
		t.Skip("ptrace is not allowed here")
	}
	if err != nil {
		t.Fatal(err)
	}
	if string(out) != "out\n" {
		t.Errorf("stdout %q", out)
	}
	if got.Processes < 2 {
		t.Errorf("%d forks, want at least 2", got.Processes)
	}
	// `env` replaces itself with `true` or `false`, so strace prints an execve but no fork.
	if diff := cmp.Diff(map[string]int{"env": 2, "true": 1, "false": 1}, got.Programs); diff != "" {
		t.Errorf("programs (-want +got):\n%s", diff)
	}
	if _, _, err := (invocation{path: "/bin/sh", stdin: []byte("exit 3")}).runTraced(); err == nil {
		t.Error("exit status 3 is no error")
	}
}

func TestStatTicks(t *testing.T) {
	got, err := statTicks([]byte("7 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 11 22 100 200 20 0 1 0"))
	if err != nil || got != 333 {
		t.Errorf("got %d, %v, want 333", got, err)
	}
	if _, err := statTicks([]byte("7 (a) S 1")); err == nil {
		t.Error("a short line is no error")
	}
}

func TestSides(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	f := pluginFolders{plugins: "/a", reference: "/b"}
	for scenario, want := range map[string][]pluginSet{
		scenarioNftables: {{sideOurs, "/a"}},
		scenarioIptables: nil,
	} {
		for _, s := range append(scenarios(), nftables()) {
			if s.name != scenario {
				continue
			}
			got, missing := f.usableSets(s)
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(pluginSet{})); diff != "" {
				t.Errorf("%s (-want +got):\n%s", scenario, diff)
			}
			if len(got)+len(missing) != 2 {
				t.Errorf("%s: %d sides usable, missing %q", scenario, len(got), missing)
			}
		}
	}
}
