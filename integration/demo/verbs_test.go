// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestWarmUpLeavesOutWhatTheKernelLacks(t *testing.T) {
	t.Setenv(failsWith(bandwidth), `{"code":105,"msg":"no ifb"}`)
	l := playedLab(t)
	if got := warmUp(t.Context(), l); got.verdict != OK {
		t.Fatalf("warm-up: %+v", got)
	}
	if diff := cmp.Diff(map[string]string{bandwidth: "no ifb"}, l.lacks); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{bandwidth: notPromised(l.chain.Chain)[bandwidth]}, notPromised(l.chain.Chain)); diff != "" {
		t.Error(diff)
	}
	row := step{name: "limit", needs: []string{portmap, bandwidth}}.row(t.Context(), l)
	if diff := cmp.Diff(Row{Step: "limit", Measured: "-", Result: Skip, Note: "no ifb"}, row); diff != "" {
		t.Error(diff)
	}
}

func TestWarmUpWithoutMasquerading(t *testing.T) {
	t.Setenv(failsWith("bridge"), `{"code":105,"msg":"no nf_tables"}`)
	l := playedLab(t)
	if got := warmUp(t.Context(), l); got.verdict != Miss {
		t.Errorf("a bridge that never works: %+v", got)
	}
	if diff := cmp.Diff(map[string]string{masquerading: "no nf_tables"}, l.lacks); diff != "" {
		t.Error(diff)
	}
	if got := notPromised(l.chain.Chain); got[masquerading] == "" || len(pluginTypes(l.chain.List)) != 3 {
		t.Errorf("not promised: %v by %v", got, pluginTypes(l.chain.List))
	}
}

func TestWithoutIPv6(t *testing.T) {
	l := playedLab(t)
	if err := l.chain.disableIPv6(); err != nil {
		t.Fatal(err)
	}
	var got struct {
		IPAM map[string]any `json:"ipam"`
	}
	if err := json.Unmarshal(l.chain.List.Plugins[0].Bytes, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"type":   "host-local",
		"ranges": []any{[]any{map[string]any{"subnet": "10.58.0.0/16"}}},
		"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
	}
	if diff := cmp.Diff(want, got.IPAM); diff != "" {
		t.Error(diff)
	}
}

func TestWarmUpMissesOnOtherErrors(t *testing.T) {
	t.Setenv(failsWith(portmap), `{"code":7,"msg":"bad key"}`)
	l := playedLab(t)
	if got := warmUp(t.Context(), l); got.verdict != Miss || !strings.Contains(got.note, "bad key") {
		t.Errorf("got %+v", got)
	}
	if len(l.lacks) != 0 || l.before != nil {
		t.Errorf("lacks %v, baseline %v", l.lacks, l.before != nil)
	}
	if got := leftovers(t.Context(), l); got.verdict != Miss {
		t.Errorf("leftovers without a baseline: %+v", got)
	}
}

func TestAddShowsEachPlugin(t *testing.T) {
	l := playedLab(t)
	if got := addPod(func(l *lab) *pod { return l.a })(t.Context(), l); got.unit != "ms" || got.value <= 0 {
		t.Fatalf("ADD: %+v", got)
	}
	if got := l.a.addresses(); got != "10.58.0.9 fd00:58::9" {
		t.Errorf("addresses %q", got)
	}
	var plugins []string
	for _, c := range l.adds {
		plugins = append(plugins, c.Verb+" "+c.Plugin)
		if c.Took <= 0 {
			t.Errorf("%s took %v", c.Plugin, c.Took)
		}
	}
	if diff := cmp.Diff([]string{"ADD bridge", "ADD portmap", "ADD bandwidth"}, plugins); diff != "" {
		t.Error(diff)
	}
	if got := timeOf(portmap)(t.Context(), l); got.verdict != Info || got.value <= 0 {
		t.Errorf("portmap's share: %+v", got)
	}
	t.Setenv(failsWith("bridge"), `{"code":11,"msg":"busy"}`)
	if got := addPod(func(l *lab) *pod { return l.a })(t.Context(), l); got.verdict != Miss || !strings.Contains(got.note, "busy") {
		t.Errorf("failing ADD: %+v", got)
	}
}

// A slow step is still OK, and its row has the time and a note.
func TestSlowMachineIsNoMiss(t *testing.T) {
	for took, note := range map[time.Duration]string{99 * time.Millisecond: "pod", time.Minute: "slow machine: usually below 100 ms; pod"} {
		got := timed(took, addTime).withNote("pod")
		want := outcome{verdict: OK, measured: fmt.Sprintf("%.1f ms", took.Seconds()*1e3), value: took.Seconds() * 1e3, unit: "ms", note: note}
		if got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	l := playedLab(t)
	t.Setenv(takesTime("bridge"), (2 * addTime).String())
	if got := addPod(func(l *lab) *pod { return l.a })(t.Context(), l); got.verdict != OK || !strings.HasPrefix(got.note, "slow machine: ") {
		t.Errorf("slow ADD: %+v", got)
	}
}

func TestRefuse(t *testing.T) {
	for name, test := range map[string]struct {
		fails string
		want  Verdict
	}{
		"coded, pod in details":   {`{"code":2,"msg":"hostPort 70000","details":"pod=demo/bad"}`, OK},
		"coded, pod in message":   {`{"code":2,"msg":"pod demo/bad: hostPort 70000"}`, OK},
		"coded, no pod named":     {`{"code":2,"msg":"hostPort 70000"}`, Miss},
		"no code, pod named":      {`{"msg":"pod demo/bad"}`, Miss},
		"code 999 and pod named":  {`{"code":999,"msg":"pod demo/bad"}`, Miss},
		"accepted":                {"", Miss},
		"not even an error: text": {"panic", Miss},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(failsWith(portmap), test.fails)
			if got := addInvalidPort(t.Context(), playedLab(t)); got.verdict != test.want {
				t.Errorf("got %+v, want %s", got, test.want)
			}
		})
	}
}

func TestLeftovers(t *testing.T) {
	l := playedLab(t)
	if err := l.recordBaseline(); err != nil {
		t.Fatal(err)
	}
	write := func(path string) {
		t.Helper()
		if err := os.MkdirAll("/var/lib/cni/networks/x", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(path) })
	}
	// The first file is written before the baseline, so that the state folders belong to it.
	write("/var/lib/cni/networks/x/lock")
	if err := l.recordBaseline(); err != nil {
		t.Fatal(err)
	}
	write("/var/lib/cni/networks/x/last_reserved_ip.0")
	write("/var/lib/cni/networks/x/.lock-ac")
	if got := leftovers(t.Context(), l); got.verdict != OK || got.measured != "0" {
		t.Errorf("files that may stay: %+v", got)
	}
	write("/var/lib/cni/networks/x/10.58.0.9")
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // no need to wait for the kernel here
	if got := leftovers(ctx, l); got.verdict != Miss || got.value != 1 || !strings.Contains(got.note, "10.58.0.9") {
		t.Errorf("a lease: %+v", got)
	}
}

func TestDelGone(t *testing.T) {
	l := playedLab(t)
	l.b = l.bad
	if got := delGone(t.Context(), l); got.verdict != OK {
		t.Errorf("got %+v", got)
	}
	if _, err := os.Stat(l.b.Path); err == nil {
		t.Error("the namespace is still there")
	}
}
