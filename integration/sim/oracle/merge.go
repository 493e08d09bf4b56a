// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math/rand/v2"

	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager/bitmask"
)

// policies are those that merge.
func policies(info *topologymanager.NUMAInfo) []topologymanager.Policy {
	var o topologymanager.PolicyOptions
	return []topologymanager.Policy{
		topologymanager.NewNonePolicy(),
		topologymanager.NewBestEffortPolicy(info, o),
		topologymanager.NewRestrictedPolicy(info, o),
		topologymanager.NewSingleNumaNodePolicy(info, o),
	}
}

// recordMerges asks with lists of all kinds, also such as no manager would give.
func recordMerges(seed uint64, n int) []merge {
	rng := rand.New(rand.NewPCG(seed, 0))
	var out []merge
	for i := range n {
		nodes := 1 + rng.IntN(4)
		info := &topologymanager.NUMAInfo{NUMADistances: topologymanager.NUMADistances{}}
		for node := range nodes {
			info.Nodes = append(info.Nodes, node)
		}
		p := policies(info)[i%4]
		m := merge{Policy: p.Name(), Machine: 1<<nodes - 1}
		var hints []map[string][]topologymanager.TopologyHint
		for range rng.IntN(4) {
			list := randomHints(rng, nodes)
			m.Lists = append(m.Lists, encoded(list))
			hints = append(hints, map[string][]topologymanager.TopologyHint{"r": list})
		}
		best, admit := p.Merge(klog.Logger{}, hints)
		m.Best, m.Admit = encode(best), admit
		out = append(out, m)
	}
	return out
}

func randomHints(rng *rand.Rand, nodes int) []topologymanager.TopologyHint {
	if rng.IntN(10) == 0 {
		return nil
	}
	out := []topologymanager.TopologyHint{}
	for range rng.IntN(6) {
		mask, _ := bitmask.NewBitMask()
		bits := 1 + rng.IntN(1<<nodes-1)
		for node := range nodes {
			if bits>>node&1 == 1 {
				_ = mask.Add(node)
			}
		}
		out = append(out, topologymanager.TopologyHint{NUMANodeAffinity: mask, Preferred: rng.IntN(3) > 0})
	}
	return out
}

func encoded(list []topologymanager.TopologyHint) []hint {
	if list == nil {
		return nil
	}
	out := []hint{}
	for _, h := range list {
		out = append(out, encode(h))
	}
	return out
}

func encode(h topologymanager.TopologyHint) hint {
	var out hint
	if h.NUMANodeAffinity != nil {
		for _, bit := range h.NUMANodeAffinity.GetBits() {
			out |= 2 << bit
		}
	}
	if h.Preferred {
		out |= 1
	}
	return out
}
