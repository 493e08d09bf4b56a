// SPDX-License-Identifier: Apache-2.0

package main

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/podlace/podlace/integration/kubeletnode"
	"github.com/podlace/podlace/pkg/cli/kubelet"
)

const (
	cpusPerVF = 2
	largest   = 8 // VFs that the pod requests
)

// arrivingPod is a pod with its start, its end and its number of VFs.
type arrivingPod struct {
	at, until float64
	vfs       int
}

// podTrace returns the random pods of a simulation run. The unit of all times is the mean lifetime of a pod.
func podTrace(seed uint64, pods int, load float64, vfs int) []arrivingPod {
	rng := rand.New(rand.NewPCG(seed, 0))
	const mean = .60*1 + .25*2 + .10*4 + .05*8
	rate := load / 100 * float64(vfs) / mean
	out := make([]arrivingPod, pods)
	now := 0.0
	for i := range out {
		now += rng.ExpFloat64() / rate
		p := arrivingPod{at: now, until: now + rng.ExpFloat64()}
		switch r := rng.IntN(100); {
		case r < 60:
			p.vfs = 1
		case r < 85:
			p.vfs = 2
		case r < 95:
			p.vfs = 4
		default:
			p.vfs = 8
		}
		out[i] = p
	}
	return out
}

// departures is a heap (container/heap) of running pods by end time.
type departures []leaving

type leaving struct {
	at    float64
	vfs   int
	grant kubeletnode.Grant
}

func (d departures) Len() int           { return len(d) }
func (d departures) Less(i, j int) bool { return d[i].at < d[j].at }
func (d departures) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }

// Push implements heap.Interface.
func (d *departures) Push(v any) { *d = append(*d, v.(leaving)) }

// Pop implements heap.Interface.
func (d *departures) Pop() any {
	last := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return last
}

// simulationRun is one run with one way of choosing VFs.
type simulationRun struct {
	*machine
	node    kubeletnode.Node
	cpus    int
	running departures
	demand  podDemand
}

// simulateRun simulates the starts and ends of the pods in a trace, and returns the results.
func simulateRun(m *machine, o options, policy kubelet.Policy, a choiceMethod, seed uint64, pods []arrivingPod) (runFigures, error) {
	c := &simulationRun{machine: m, cpus: o.cpus}
	c.node = kubeletnode.Node{Policy: policy, VFs: kubelet.NewDevices(m.all, m.near), Prefer: m.preferFunc(a), Pick: randomPicker(seed)}
	if o.cpus > 0 {
		c.node.CPUs = kubeletnode.NewCPUs(m.all, o.cpus)
	}
	var t runCounters
	for i, p := range pods {
		for len(c.running) > 0 && c.running[0].at <= p.at {
			gone := heap.Pop(&c.running).(leaving)
			c.node.Remove(gone.grant)
			c.demand.add(gone.vfs, -1)
		}
		if err := c.admitPod(p, &t, i >= len(pods)/10); err != nil {
			return runFigures{}, fmt.Errorf("%s, %s, %s, seed %d: %w", m.topology, policy, a, seed, err)
		}
	}
	return t.figures(), nil
}

// admitPod tries to admit a pod. The result counts only if counts is set, which it is not while the first pods fill the node.
func (c *simulationRun) admitPod(p arrivingPod, t *runCounters, counts bool) error {
	if !counts {
		t = &runCounters{}
	}
	before := c.currentState()
	t.countState(c, before)
	t.pods++
	request := kubeletnode.Request{VFs: p.vfs}
	if c.cpus > 0 {
		request.CPUs = p.vfs * cpusPerVF
	}
	if before.free < p.vfs || c.cpus > 0 && before.cpus < request.CPUs {
		t.full++
		return nil
	}
	grant, err := c.node.Admit(kubeletnode.Pod{Containers: []kubeletnode.Request{request}})
	switch {
	case errors.Is(err, kubeletnode.ErrAffinity):
		t.refused++
		if with := c.demand.with(p.vfs); with.fitsAll(c.nodes, c.nodeCapacity(c.cpus)) {
			t.avoidable++
		}
		return nil
	case err != nil:
		return err
	case len(grant.VFs) != 1 || len(grant.VFs[0]) != p.vfs:
		return fmt.Errorf("%d VFs wanted, %v granted", p.vfs, grant.VFs)
	}
	t.countGrant(c, before, grant)
	c.demand.add(p.vfs, 1)
	heap.Push(&c.running, leaving{p.until, p.vfs, grant})
	return nil
}

// randomPicker picks random elements, as the kubelet does when it takes the first ones of a Go map.
func randomPicker(seed uint64) kubeletnode.Pick {
	rng := rand.New(rand.NewPCG(seed, 1))
	return func(from []int, n int) []int {
		from = slices.Clone(from)
		for i := range n {
			j := i + rng.IntN(len(from)-i)
			from[i], from[j] = from[j], from[i]
		}
		return from[:n]
	}
}

func first(vfs []int, n int) []int { return vfs[:min(n, len(vfs))] }

// difference returns the sorted elements of list that are not in other.
func difference(list, other []int) []int {
	out := slices.DeleteFunc(slices.Clone(list), func(i int) bool { return slices.Contains(other, i) })
	slices.Sort(out)
	return out
}
