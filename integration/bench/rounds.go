// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/sandbox"
)

const (
	sideOurs      = "ours"
	sideReference = "reference"

	warmUp = 2
	settle = 4 * time.Millisecond // gives the kernel time to finish the previous side's deferred work
)

// contender takes part in the rounds of a scenario: a chain.
type contender interface {
	run(verb string, exec runner) error
}

// entry is a contender with its name and its measurements.
type entry struct {
	side    string
	chain   contender
	samples map[string]*sample
	err     error
}

// sample holds the times of one verb: of the whole chain, and of each process.
type sample struct {
	chain     []time.Duration
	processes map[string][]time.Duration
	order     []string
}

func newEntry(side string, c contender) *entry {
	e := &entry{side: side, chain: c, samples: map[string]*sample{}}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		e.samples[verb] = &sample{processes: map[string][]time.Duration{}}
	}
	return e
}

// race runs the rounds of one scenario. Every second round runs in reverse order, so that no program always follows the same one. A
// failed contender leaves the race, and its error is kept.
func race(entries []*entry, rounds int) {
	for round := range rounds + warmUp {
		for _, e := range entries {
			if e.err == nil {
				e.err = e.lap(round >= warmUp)
			}
		}
		slices.Reverse(entries)
	}
	if (rounds+warmUp)%2 == 1 {
		slices.Reverse(entries)
	}
}

// lap runs ADD, CHECK and DEL once. DEL runs even after a failure.
func (e *entry) lap(keep bool) error {
	var errs []error
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		if len(errs) > 0 && verb == verbCheck {
			continue
		}
		time.Sleep(settle)
		if err := e.measure(verb, keep); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (e *entry) measure(verb string, keep bool) error {
	var total time.Duration
	var order []string
	times := map[string]time.Duration{}
	err := e.chain.run(verb, func(inv invocation) ([]byte, error) {
		out, took, err := inv.timed()
		total += took
		times[inv.name] = took
		order = append(order, inv.name)
		return out, err
	})
	if err != nil || !keep {
		return err
	}
	s := e.samples[verb]
	s.chain, s.order = append(s.chain, total), order
	for name, took := range times {
		s.processes[name] = append(s.processes[name], took)
	}
	return nil
}

// startedBy counts, in one round without time measurement, the processes that each verb starts besides the plugins.
func (e *entry) startedBy() (map[string]started, error) {
	counts := map[string]started{}
	var errs []error
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		total := started{Programs: map[string]int{}}
		err := e.chain.run(verb, func(inv invocation) ([]byte, error) {
			out, s, err := inv.traced()
			total.add(s)
			return out, err
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", e.side, err))
		}
		counts[verb] = total
	}
	return counts, errors.Join(errs...)
}

// percentile returns the nearest-rank percentile of at least one duration.
func percentile(times []time.Duration, p int) time.Duration {
	sorted := slices.Clone(times)
	slices.Sort(sorted)
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

// folders are the two plugin folders under comparison.
type folders struct{ plugins, reference string }

// nodes has one network namespace for each side. It is the side's node: bridges, rules and qdiscs of one side are invisible to the
// other.
type nodes map[string]*sandbox.Pod

func (n nodes) open(name string) (*sandbox.Pod, error) {
	if pod, ok := n[name]; ok {
		return pod, nil
	}
	pod, err := sandbox.NewPod(name)
	if err != nil {
		return nil, fmt.Errorf("make network namespace %s: %w", name, err)
	}
	n[name] = pod
	return pod, nil
}

// pluginChain returns the chain of a scenario for one side, on the node of that name.
func (n nodes) pluginChain(side side, nodeName string, s scenario, limited bool) (*chain, error) {
	node, err := n.open(nodeName)
	if err != nil {
		return nil, err
	}
	id := nodeName + "-" + s.slug()
	pod, err := n.open(id)
	if err != nil {
		return nil, err
	}
	return &chain{
		folder: side.folder, network: nodeName + "-" + s.slug(), id: id, node: node, pod: pod,
		plugins: s.plugins(), args: s.capabilities(limited),
	}, nil
}

// entries makes the contenders of a scenario.
func (n nodes) entries(sides []side, s scenario) ([]*entry, error) {
	var out []*entry
	for _, side := range sides {
		c, err := n.pluginChain(side, "node-"+side.name, s, true)
		if err != nil {
			return nil, err
		}
		out = append(out, newEntry(side.name, c))
	}
	return out, nil
}
