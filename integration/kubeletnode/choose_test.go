// SPDX-License-Identifier: Apache-2.0

package kubeletnode

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// pickLast returns the last n devices, while a recordingPlugin prefers the first, so that a test sees which of them chose.
func pickLast(from []int, n int) []int { return from[len(from)-n:] }

// A recordingPlugin emulates a device plugin that prefers the first devices, and records all requests.
type recordingPlugin struct{ asked []string }

func (p *recordingPlugin) prefer(available, must []int, n int) []int {
	available = slices.Clone(available)
	slices.Sort(available)
	p.asked = append(p.asked, fmt.Sprintf("%d of %v with %v", n, available, must))
	rest := slices.DeleteFunc(available, func(i int) bool { return slices.Contains(must, i) })
	return append(slices.Clone(must), rest[:n-len(must)]...)
}

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		name, devices string
		hint          kubelet.Mask
		n             int
		reusable      []int
		want          []int // of the plugin that prefers the first devices
		asked         []string
		random        []int // of the plugin without a preference
	}{
		{"no hint", "0 0 1 1", 0, 2, nil, []int{0, 1}, []string{"2 of [0 1 2 3] with []"}, []int{2, 3}},
		{"no hint, as many as there are", "0 0", 0, 2, nil, []int{0, 1}, []string{"2 of [0 1] with []"}, []int{0, 1}},
		{"near the hint", "0 1 1 1", 2, 2, nil, []int{1, 2}, []string{"2 of [1 2 3] with []"}, []int{2, 3}},
		{"not asked for as many as are near", "0 1 1", 2, 2, nil, []int{1, 2}, nil, []int{1, 2}},
		{"more than are near", "0 0 1 1 -", 2, 3, nil, []int{0, 2, 3}, []string{"3 of [0 1 2 3 4] with [2 3]"}, []int{1, 2, 3}},
		{"those near no node come last", "- 0 1 -", 2, 3, nil, []int{0, 1, 2}, []string{"3 of [0 1 2 3] with [2]"}, []int{1, 2, 3}},
		{"near several nodes", "01 0 1", 2, 1, nil, []int{0}, []string{"1 of [0 2] with []"}, []int{2}},
		{"not the ill, not the used", "0! 0x 0 0", 1, 1, nil, []int{2}, []string{"1 of [2 3] with []"}, []int{3}},
		{"reusable ones first", "0x 0 0 0", 1, 2, []int{0}, []int{0, 1}, []string{"2 of [0 1 2 3] with [0]"}, []int{0, 3}},
		{"more reusable ones than needed", "0x 0x 0", 1, 1, []int{0, 1}, []int{1}, nil, []int{1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var p recordingPlugin
			got, err := choose(ParseDevices(3, c.devices), kubelet.Hint{Nodes: c.hint}, c.n, c.reusable, p.prefer, pickLast)
			if err != nil || !slices.Equal(got, c.want) || !slices.Equal(p.asked, c.asked) {
				t.Errorf("got %v, %v, asked %q\nwant %v, %q", got, err, p.asked, c.want, c.asked)
			}
			got, err = choose(ParseDevices(3, c.devices), kubelet.Hint{Nodes: c.hint}, c.n, c.reusable, nil, pickLast)
			if err != nil || !slices.Equal(got, c.random) {
				t.Errorf("without a plugin's answer: got %v, %v, want %v", got, err, c.random)
			}
		})
	}
	for _, bad := range []string{"0! 0!", "0x 0 0!"} {
		if got, err := choose(ParseDevices(3, bad), kubelet.Hint{}, 2, nil, nil, pickLast); err == nil {
			t.Errorf("2 of %s: %v", bad, got)
		}
	}
}

// Admit allocates the same VFs as a real kubelet 1.37 with the policy best-effort and four VFs near each of two NUMA nodes.
func TestAsMeasured(t *testing.T) {
	var p recordingPlugin
	n := Node{Policy: kubelet.BestEffort, VFs: ParseDevices(3, "0 0 0 0 1 1 1 1"), Prefer: p.prefer, Pick: pickLast}
	var got [][]int
	for _, vfs := range []int{1, 1, 2, 3} {
		g, err := n.Admit(Pod{Containers: []Request{{VFs: vfs}}})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, g.VFs...)
	}
	want := [][]int{{0}, {1}, {2, 3}, {4, 5, 6}}
	asked := []string{"1 of [0 1 2 3] with []", "1 of [1 2 3] with []", "3 of [4 5 6 7] with []"}
	if !cmp.Equal(got, want) || !slices.Equal(p.asked, asked) {
		t.Errorf("got %v, asked %q\nwant %v, %q", got, p.asked, want, asked)
	}
}

func TestAdmit(t *testing.T) {
	two := []Request{{VFs: 2}, {VFs: 2}}
	for _, c := range []struct {
		name, devices string
		node          Node
		pod           Pod
		want          string
	}{
		{"none spreads", "0 0x 1 1x", Node{Policy: kubelet.None}, Pod{Containers: []Request{{VFs: 2}}}, "[any] [[0 2]] <nil>"},
		{"best-effort spreads", "0 0x 1 1x", Node{Policy: kubelet.BestEffort}, Pod{Containers: []Request{{VFs: 2}}}, "[{0,1}] [[0 2]] <nil>"},
		{"restricted refuses", "0 0x 1 1x", Node{Policy: kubelet.Restricted}, Pod{Containers: []Request{{VFs: 2}}},
			"[] [] " + ErrAffinity.Error()},
		{"each container by itself", "0 0 1 1", Node{Policy: kubelet.SingleNUMA}, Pod{Containers: two}, "[{0}* {1}*] [[0 1] [2 3]] <nil>"},
		{"the pod as a whole", "0 0 1 1", Node{Policy: kubelet.SingleNUMA, PodScope: true}, Pod{Containers: two}, "[] [] " + ErrAffinity.Error()},
		{"the pod as a whole near one", "0 0 1 1 1 1", Node{Policy: kubelet.SingleNUMA, PodScope: true}, Pod{Containers: two},
			"[{1}* {1}*] [[4 5] [2 3]] <nil>"},
		{"the second fails, the first gives back", "0 0 1", Node{Policy: kubelet.SingleNUMA}, Pod{Containers: two},
			"[] [] " + ErrAffinity.Error()},
		{"init containers leave theirs", "0 0 1 1 1", Node{Policy: kubelet.Restricted}, Pod{Init: two, Containers: []Request{{VFs: 2}}},
			"[{0}* {0}* {0}*] [[0 1] [0 1] [0 1]] <nil>"},
		{"and not twice", "0 0 1 1", Node{Policy: kubelet.None}, Pod{Init: two[:1], Containers: two}, "[any any any] [[2 3] [2 3] [0 1]] <nil>"},
		{"CPUs near another node", "0x 0x 1 1", Node{Policy: kubelet.SingleNUMA, CPUs: &CPUs{*ParseDevices(3, "0 0 1 1x")}},
			Pod{Containers: []Request{{2, 2}}}, "[] [] " + ErrAffinity.Error()},
		{"CPUs near the same node", "0 0 1 1", Node{Policy: kubelet.SingleNUMA, CPUs: &CPUs{*ParseDevices(3, "0 0x 1 1")}},
			Pod{Containers: []Request{{2, 2}}}, "[{1}*] [[2 3]] <nil>"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.node.VFs, c.node.Pick = ParseDevices(3, c.devices), pickLast
			g, err := c.node.Admit(c.pod)
			var words []string
			for _, h := range g.Hints {
				words = append(words, h.String())
			}
			if got := fmt.Sprint(words, g.VFs, err); got != c.want {
				t.Errorf("got %s\nwant %s", got, c.want)
			}
			if c.node.Remove(g); !slices.Equal(c.node.VFs.Used, ParseDevices(3, c.devices).Used) {
				t.Errorf("left behind: %v", c.node.VFs.Used)
			}
		})
	}
}

// Two pods never have the same VF or CPU, and all are free after the last Remove.
func TestNothingTwice(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	pick := func(from []int, n int) []int {
		from = slices.Clone(from)
		rng.Shuffle(len(from), func(i, j int) { from[i], from[j] = from[j], from[i] })
		return from[:n]
	}
	for _, policy := range []kubelet.Policy{kubelet.None, kubelet.BestEffort, kubelet.Restricted, kubelet.SingleNUMA} {
		n := Node{Policy: policy, VFs: ParseDevices(7, "0 0 0 0 1 1 1 1 2 2 2 2 - -"), CPUs: NewCPUs(7, 4), Pick: pick}
		var pods []Grant
		for range 2000 {
			if len(pods) > 0 && rng.IntN(2) == 0 {
				i := rng.IntN(len(pods))
				n.Remove(pods[i])
				pods = slices.Delete(pods, i, i+1)
			}
			g, err := n.Admit(Pod{Init: []Request{{VFs: rng.IntN(3)}},
				Containers: []Request{{rng.IntN(4), rng.IntN(3)}, {rng.IntN(4), rng.IntN(3)}}})
			if err == nil {
				pods = append(pods, g)
			} else if policy == kubelet.None && errors.Is(err, ErrAffinity) {
				t.Fatal(err)
			}
			used := 0
			for _, g := range pods {
				of := slices.Concat(g.VFs...)
				slices.Sort(of)
				used += len(slices.Compact(of))
			}
			for _, u := range n.VFs.Used {
				if u {
					used--
				}
			}
			if used != 0 {
				t.Fatalf("%s: pods have %d VFs more than are used", policy, used)
			}
		}
		for _, g := range pods {
			n.Remove(g)
		}
		if slices.Contains(n.VFs.Used, true) || slices.Contains(n.CPUs.Used, true) {
			t.Errorf("%s: in use although no pod is left", policy)
		}
	}
}

func TestCPUs(t *testing.T) {
	c := NewCPUs(3, 4)
	var got [][]int
	for _, want := range []struct {
		n    int
		hint kubelet.Mask
	}{{1, 0}, {1, 0}, {4, 0}, {2, 0}} {
		cpus, err := c.Take(kubelet.Hint{Nodes: want.hint}, want.n)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, cpus)
	}
	// A request for four CPUs gets all of a NUMA node. Smaller ones get those of the node with the fewest free CPUs.
	if want := [][]int{{0}, {1}, {4, 5, 6, 7}, {2, 3}}; !cmp.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	c = NewCPUs(3, 4)
	if got, err := c.Take(kubelet.Hint{Nodes: 2}, 5); err != nil || !slices.Equal(got, []int{0, 4, 5, 6, 7}) {
		t.Errorf("5 near node 1: %v, %v", got, err)
	}
	if got, err := c.Take(kubelet.Hint{}, 4); err == nil {
		t.Errorf("4 of 3: %v", got)
	}
}
