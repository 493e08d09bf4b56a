// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const (
	sideOurs      = "ours"
	sideReference = "reference"

	warmUp = 2
	settle = 4 * time.Millisecond // gives the kernel time to finish the previous side's deferred work
)

// A contender, such as a chain, runs the verbs that the benchmark measures.
type contender interface {
	run(verb string, exec processRunner) error
}

type contenderEntry struct {
	side    string
	chain   contender
	samples map[string]*verbSample
	err     error
}

// verbSample contains the times of one verb, for the whole chain and for each process.
type verbSample struct {
	chain     []time.Duration
	cpu       []time.Duration // of the chain
	processes map[string][]time.Duration
	order     []string
}

func newEntry(side string, c contender) *contenderEntry {
	e := &contenderEntry{side: side, chain: c, samples: map[string]*verbSample{}}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		e.samples[verb] = &verbSample{processes: map[string][]time.Duration{}}
	}
	return e
}

// runRounds measures all entries repeatedly, every second time in reverse order so that it favours none. Once an entry fails, later
// repetitions omit it.
func runRounds(entries []*contenderEntry, rounds int) {
	for round := range rounds + warmUp {
		for _, e := range entries {
			if e.err == nil {
				e.err = e.runLap(round >= warmUp)
			}
		}
		slices.Reverse(entries)
	}
	if (rounds+warmUp)%2 == 1 {
		slices.Reverse(entries)
	}
}

// runLap runs ADD, CHECK and DEL once and stores the times. DEL runs even after a failure.
func (e *contenderEntry) runLap(keep bool) error {
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

func (e *contenderEntry) measure(verb string, keep bool) error {
	var total cost
	var order []string
	times := map[string]time.Duration{}
	err := e.chain.run(verb, func(inv invocation) ([]byte, error) {
		out, took, err := inv.runTimed()
		total.wall += took.wall
		total.cpu += took.cpu
		times[inv.name] = took.wall
		order = append(order, inv.name)
		return out, err
	})
	if err != nil || !keep {
		return err
	}
	s := e.samples[verb]
	s.chain, s.cpu, s.order = append(s.chain, total.wall), append(s.cpu, total.cpu), order
	for name, took := range times {
		s.processes[name] = append(s.processes[name], took)
	}
	return nil
}

// countProcesses runs ADD, CHECK and DEL once, and counts the processes that each verb starts.
func (e *contenderEntry) countProcesses() (map[string]startedProcesses, error) {
	counts := map[string]startedProcesses{}
	var errs []error
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		total := startedProcesses{Programs: map[string]int{}}
		err := e.chain.run(verb, func(inv invocation) ([]byte, error) {
			out, s, err := inv.runTraced()
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

// percentile returns the nearest-rank percentile of a non-empty slice of times.
func percentile(times []time.Duration, p int) time.Duration {
	sorted := slices.Clone(times)
	slices.Sort(sorted)
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

type pluginFolders struct{ plugins, reference string }

// nodes are simulated nodes by name. Each is a network namespace of one plugin set, so that plugin sets share no bridges, rules or qdiscs.
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

func (n nodes) pluginChain(side pluginSet, nodeName string, s scenario, limited bool) (*chain, error) {
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
		plugins: s.pluginEntries(), args: s.capabilities(limited),
	}, nil
}

// makeEntries returns an entry with the chain for each plugin set.
func (n nodes) makeEntries(sides []pluginSet, s scenario) ([]*contenderEntry, error) {
	var out []*contenderEntry
	for _, side := range sides {
		c, err := n.pluginChain(side, "node-"+side.name, s, true)
		if err != nil {
			return nil, err
		}
		out = append(out, newEntry(side.name, c))
	}
	return out, nil
}
