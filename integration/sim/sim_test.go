// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli/kubelet"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

const bestFit = choiceMethod(pool.NUMABestFit)

// runWithFlags runs the simulation with the given flags.
func runWithFlags(t *testing.T, args ...string) *report {
	t.Helper()
	o, err := parse(args, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	r, err := runAll(o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *report) mean(t *testing.T, p kubelet.Policy, a choiceMethod, measure int) float64 {
	t.Helper()
	row, ok := r.findRow(r.topologies[0], p, a)
	if !ok {
		t.Fatalf("no row for %s, %s", p, a)
	}
	return row.meanOf(measure).mean
}

// TestAllNearOneNode covers the kubelet's default policy on small and large machines: if a NUMA node has room for a pod, all its VFs are
// near one.
func TestAllNearOneNode(t *testing.T) {
	for _, topology := range []string{"2x2x16", "2x1x64", "4x2x8", "8x1x8", "2x4x5"} {
		r := runWithFlags(t, "-seeds", "2", "-pods", "1000", "-policies", "none", "-topology", topology)
		for _, a := range []pool.Policy{pool.NUMABestFit, pool.Pack, pool.Balance} {
			row, _ := r.findRow(r.topologies[0], kubelet.None, choiceMethod(a))
			for seed, f := range row.runs {
				// The policy "pack" minimizes the number of PFs before that of NUMA nodes. If these have several PFs, it may choose fewer PFs on more
				// nodes.
				if f[oneNUMAWithRoom] != 100 && a != pool.Pack {
					t.Errorf("%s, %s, seed %d: %.2f %% near one node", topology, a, seed, f[oneNUMAWithRoom])
				}
			}
		}
		if got := r.mean(t, kubelet.None, random, oneNUMAWithRoom); got > 60 {
			t.Errorf("%s: %.1f %% near one node by chance", topology, got)
		}
	}
}

// For the topology 2x2x16, TestEffects checks the best method for each measure, and which measures do not depend on the choice of VFs.
func TestEffects(t *testing.T) {
	r := runWithFlags(t, "-seeds", "3", "-pods", "1500", "-topology", "2x2x16")
	for _, c := range []struct {
		policy      kubelet.Policy
		more, fewer choiceMethod
		measure     int
		by          float64
	}{
		{kubelet.None, bestFit, random, oneNUMA, 50},
		{kubelet.None, bestFit, random, onePF, 60},
		{kubelet.None, bestFit, lexical, onePF, 20},
		{kubelet.None, "pack", "balance", wholePF, 30},
		{kubelet.None, "pack", "balance", gap, 3},
		{kubelet.None, "balance", "pack", jain, 0.03},
		{kubelet.None, "distinct-pf", random, distinctPFs, 25},
		{kubelet.None, bestFit, "distinct-pf", oneNUMA, 20},
		{kubelet.SingleNUMA, bestFit, random, onePF, 40},
	} {
		if d := r.mean(t, c.policy, c.more, c.measure) - r.mean(t, c.policy, c.fewer, c.measure); d < c.by {
			t.Errorf("%s: %s is %.3f above %s in %q, want %.3f", c.policy, c.more, d, c.fewer, measures()[c.measure].title, c.by)
		}
	}
	for _, a := range r.allocators {
		if got := r.mean(t, kubelet.SingleNUMA, a, oneNUMA); got != 100 {
			t.Errorf("single-numa-node, %s: %.1f %% near one node", a, got)
		}
		if got, want := r.mean(t, kubelet.SingleNUMA, a, refused), r.mean(t, kubelet.SingleNUMA, random, refused); got != want || got == 0 {
			t.Errorf("single-numa-node, %s: %.2f %% refused, by chance %.2f %%", a, got, want)
		}
		if got := r.mean(t, kubelet.None, a, refused); got != 0 {
			t.Errorf("none, %s: %.2f %% refused", a, got)
		}
	}
	for _, text := range []string{"| 2x2x16 | none | pack | ", "| 2x2x16 | none | balance | ", "numa-best-fit has 100.0 ± 0.0 %"} {
		if !strings.Contains(r.markdown(), text) {
			t.Errorf("not reported: %s", text)
		}
	}
}

// With too few PFs for a pod on one NUMA node, distinct-pf uses several nodes. With enough PFs but too few network cards, it uses one.
func TestPorts(t *testing.T) {
	for _, ports := range []string{"1", "2"} {
		r := runWithFlags(t, "-seeds", "2", "-pods", "1000", "-topology", "2x2x16", "-policies", "none", "-ports", ports)
		if got := r.mean(t, kubelet.None, "distinct-pf", oneNUMAWithRoom); got < 50 || got > 80 {
			t.Errorf("%s ports on a card: %.1f %% near one node, want 50 to 80", ports, got)
		}
	}
}

// Only some refusals are avoidable. For example, a pod with 8 and one with 2 of the 9 VFs on each of two NUMA nodes leave 8 free VFs, but
// no placement leaves them all near one node, so refusing another pod with 8 is unavoidable.
func TestAvoidable(t *testing.T) {
	r := runWithFlags(t, "-seeds", "2", "-pods", "20000", "-load", "40", "-topology", "2x1x9", "-policies", "single-numa-node", "-allocators",
		"random")
	all, some := r.mean(t, kubelet.SingleNUMA, random, refused), r.mean(t, kubelet.SingleNUMA, random, avoidable)
	if some <= 0 || some >= all {
		t.Errorf("%.2f %% refused, %.2f %% avoidable: want fewer, and some", all, some)
	}
}

// TestFits compares the result of fitsAll with a search of all placements.
func TestFits(t *testing.T) {
	var place func(pods, left []int) bool
	place = func(pods, left []int) bool {
		if len(pods) == 0 {
			return true
		}
		for n := range left {
			if left[n] >= pods[0] {
				left[n] -= pods[0]
				ok := place(pods[1:], left)
				if left[n] += pods[0]; ok {
					return true
				}
			}
		}
		return false
	}
	rng := rand.New(rand.NewPCG(3, 4))
	yes := 0
	for range 3000 {
		var d podDemand
		var pods []int
		for range 2 + rng.IntN(6) {
			vfs := 1 << rng.IntN(len(d))
			pods = append(pods, vfs)
			d.add(vfs, 1)
		}
		nodes, capacity := 1+rng.IntN(3), 4+rng.IntN(12)
		want := place(pods, slices.Repeat([]int{capacity}, nodes))
		if got := d.fitsAll(nodes, capacity); got != want {
			t.Fatalf("%v in %d nodes of %d: %v, want %v", pods, nodes, capacity, got, want)
		}
		yes += count(want)
	}
	if yes < 500 || yes > 2500 {
		t.Errorf("%d of 3000 fit: that is no test", yes)
	}
}

func TestConfidence(t *testing.T) {
	got := confidenceInterval([]float64{1, 2, 3, 4, 5})
	if want := 2.776 * math.Sqrt(2.5/5); got.mean != 3 || math.Abs(got.half-want) > 1e-9 {
		t.Errorf("got %v, want 3 ± %v", got, want)
	}
	for freedom, want := range map[int]float64{1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 10: 2.228, 11: 2.201, 19: 2.093, 29: 2.045, 99: 1.984,
		100000: 1.960} {
		if got := studentQuantile(freedom); math.Abs(got-want) > 0.0006 {
			t.Errorf("%d: %.4f, want %.3f", freedom, got, want)
		}
	}
}

// TestTrace checks that the sizes, the load and the lifetimes of the random pods have the documented distributions.
func TestTrace(t *testing.T) {
	const n = 50000
	pods := podTrace(7, n, 85, 64)
	sizes, life, work := map[int]int{}, 0.0, 0.0
	for _, p := range pods {
		sizes[p.vfs]++
		life += p.until - p.at
		work += (p.until - p.at) * float64(p.vfs)
	}
	for vfs, want := range map[int]float64{1: .60, 2: .25, 4: .10, 8: .05} {
		if got := float64(sizes[vfs]) / n; math.Abs(got-want) > .01 {
			t.Errorf("%.3f want %d VFs, not %.2f", got, vfs, want)
		}
	}
	if load := work / pods[n-1].at / 64; math.Abs(life/n-1) > .02 || math.Abs(load-.85) > .02 {
		t.Errorf("lives of %.3f, load %.3f", life/n, load)
	}
	if slices.Equal(pods[:9], podTrace(8, 9, 85, 64)) {
		t.Error("another seed, the same pods")
	}
}

func TestSameAgain(t *testing.T) {
	args := []string{"-seeds", "2", "-pods", "300", "-topology", "2x2x8", "-cpus", "32", "-ports", "2"}
	if a, b := runWithFlags(t, args...).markdown(), runWithFlags(t, args...).markdown(); a != b {
		t.Errorf("first\n%s\nthen\n%s", a, b)
	}
}

// The Topology Manager places a pod's VFs and CPUs near one NUMA node. Without it, the device plugin does not learn that of the CPUs, so
// they are apart in many pods.
func TestCPUs(t *testing.T) {
	r := runWithFlags(t, "-seeds", "2", "-pods", "1000", "-topology", "2x2x16", "-cpus", "96", "-policies", "none,single-numa-node")
	for _, a := range r.allocators {
		if got := r.mean(t, kubelet.SingleNUMA, a, nearCPUs); got != 100 {
			t.Errorf("single-numa-node, %s: %.1f %%", a, got)
		}
		if got := r.mean(t, kubelet.None, a, nearCPUs); got < 10 || got > 90 {
			t.Errorf("none, %s: %.1f %%", a, got)
		}
	}
}

func TestParse(t *testing.T) {
	for args, want := range map[string]string{
		"-topology 2x2":             "want NODESxPFSxVFS",
		"-topology 2x2x16x":         "want NODESxPFSxVFS",
		"-topology 9x2x16":          "at most 8 nodes",
		"-topology 2x1x7":           "at least 8 VFs",
		"-topology 2x3x16 -ports 2": "whole cards",
		"-policies strict":          `unknown policy "strict"`,
		"-allocators first":         `unknown choice "first"`,
		"-seeds 1":                  "want -seeds 2",
		"-cpus 8":                   "-cpus 0 or 16",
		"more":                      `unknown argument "more"`,
	} {
		if _, err := parse(strings.Fields(args), io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
