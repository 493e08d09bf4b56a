// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/podlace/podlace/integration/kubeletnode"
	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// freeState is how many VFs and CPUs are free at one time.
type freeState struct {
	free, cpus   int
	pfs, nodes   []int // free VFs
	onPF, onNode int   // maximum number of VFs
}

func (c *simulationRun) currentState() freeState {
	s := freeState{pfs: make([]int, c.nodes*c.pfs), nodes: make([]int, c.nodes)}
	for vf, used := range c.node.VFs.Used {
		if !used {
			s.free++
			s.pfs[c.pf[vf]]++
			s.nodes[c.machine.node[vf]]++
		}
	}
	for _, n := range s.pfs {
		s.onPF = max(s.onPF, n)
	}
	for _, n := range s.nodes {
		s.onNode = max(s.onNode, n)
	}
	if c.node.CPUs != nil {
		for _, used := range c.node.CPUs.Used {
			if !used {
				s.cpus++
			}
		}
	}
	return s
}

type runCounters struct {
	pods, full, refused, avoidable int
	granted, near                  int // all pods, and those with VFs and CPUs near one node
	multi, oneNUMA, onePF          int // pods with several VFs
	could, did                     int // pods of these for which a node had room, and of those the pods near one node
	spreadable, distinct           int // pods of these with at most as many VFs as there are PFs
	looks, some                    int // moments, and those with a free VF
	enough, whole                  int // moments with eight free VFs, and with eight of one PF
	onPF, onNode, gap, jain        float64
}

// countState counts the free VFs when a pod arrives. Arrivals are random, so their mean equals that over time.
func (t *runCounters) countState(c *simulationRun, s freeState) {
	t.looks++
	if s.free > 0 {
		t.some++
		t.onPF += float64(s.onPF) / float64(s.free)
		t.onNode += float64(s.onNode) / float64(s.free)
	}
	if s.free >= largest {
		t.enough++
		if s.onPF >= largest {
			t.whole++
		}
	}
	least, sum, squares := s.onPF, 0, 0
	for _, free := range s.pfs {
		least = min(least, free)
		used := c.vfs - free
		sum += used
		squares += used * used
	}
	t.gap += float64(s.onPF - least)
	if squares == 0 {
		t.jain++
		return
	}
	t.jain += float64(sum*sum) / float64(squares*len(s.pfs))
}

// countGrant adds the properties of a pod's allocation to the counters.
func (t *runCounters) countGrant(c *simulationRun, before freeState, g kubeletnode.Grant) {
	var nodes, near kubelet.Mask
	pfs := map[int]bool{}
	for _, vf := range g.VFs[0] {
		nodes |= c.near[vf]
		pfs[c.pf[vf]] = true
	}
	near = nodes
	for _, cpu := range g.CPUs[0] {
		near |= c.node.CPUs.Near[cpu]
	}
	t.granted++
	t.near += count(near.Count() == 1)
	size := len(g.VFs[0])
	if size < 2 {
		return
	}
	t.multi++
	t.oneNUMA += count(nodes.Count() == 1)
	t.onePF += count(len(pfs) == 1)
	if before.onNode >= size {
		t.could++
		t.did += count(nodes.Count() == 1)
	}
	if size <= len(before.pfs) {
		t.spreadable++
		t.distinct += count(len(pfs) == size)
	}
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// runFigures are the results of a run by measure.
type runFigures [measureCount]float64

func (t *runCounters) figures() runFigures {
	percent := func(part, of int) float64 {
		if of == 0 {
			return 0
		}
		return 100 * float64(part) / float64(of)
	}
	mean := func(sum float64, n int) float64 { return sum / float64(max(1, n)) }
	return runFigures{
		percent(t.oneNUMA, t.multi), percent(t.did, t.could), percent(t.onePF, t.multi), percent(t.distinct, t.spreadable),
		percent(t.near, t.granted),
		percent(t.full, t.pods), percent(t.refused, t.pods), percent(t.avoidable, t.pods),
		100 * mean(t.onNode, t.some), 100 * mean(t.onPF, t.some), percent(t.whole, t.enough),
		mean(t.gap, t.looks), mean(t.jain, t.looks),
	}
}
