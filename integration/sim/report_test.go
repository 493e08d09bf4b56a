// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kubeletnode"
	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// TestState: of four PFs with four VFs each, all VFs of the first and half of the second are in use.
func TestState(t *testing.T) {
	m, err := newMachine(topology{nodes: 2, pfs: 2, vfs: 4, ports: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := &simulationRun{machine: m, node: kubeletnode.Node{VFs: kubelet.NewDevices(m.all, m.near)}}
	for vf := range 6 {
		c.node.VFs.Used[vf] = true
	}
	var counted runCounters
	counted.countState(c, c.currentState())
	got := counted.figures()
	for i, want := range map[int]float64{largestOnNode: 80, largestOnPF: 40, wholePF: 0, gap: 4, jain: 0.45} {
		if math.Abs(got[i]-want) > 1e-9 {
			t.Errorf("%s: %v, want %v", measures()[i].title, got[i], want)
		}
	}
}

// The report lists a loss only for a significant difference. A larger `gap` and a smaller index of Jain are worse.
func TestLosses(t *testing.T) {
	machine := topology{nodes: 2, pfs: 2, vfs: 16, ports: 1}
	runs := func(values map[int][]float64) []runFigures {
		out := make([]runFigures, 3)
		for measure, v := range values {
			for seed := range out {
				out[seed][measure] = v[seed]
			}
		}
		return out
	}
	r := &report{rows: []row{
		{machine, kubelet.None, random, runs(map[int][]float64{onePF: {10, 11, 12}, gap: {3, 4, 5}, jain: {.9, .8, .7}, wholePF: {10, 20, 30}})},
		{machine, kubelet.None, lexical, runs(nil)},
		{machine, kubelet.None, "pack", runs(map[int][]float64{onePF: {90, 91, 92}, gap: {7, 8, 9.1}, jain: {.8, .7, .59},
			wholePF: {9, 25, 23}})},
	}}
	got := map[int]bool{}
	for _, l := range r.findLosses() {
		if l.allocator != "pack" {
			t.Errorf("%s loses", l.allocator)
		}
		got[l.measure] = true
	}
	if len(got) != 2 || !got[gap] || !got[jain] {
		t.Errorf("got %v, want the gap and Jain's index", got)
	}
	var out strings.Builder
	r.writeLosses(&out)
	for _, want := range []string{
		"random: 2 of 12 choices and measures",
		"| 2x2x16 | none | pack | most - fewest used of a PF: 8.0, 4.0; Jain's index of PFs: 0.697, 0.800 |",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
