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

// A contender runs the verbs that the benchmark measures, usually with the plugins of one plugin set. The type chain implements the
// interface contender.
type contender interface {
	run(verb string, exec processRunner) error
}

// The type contenderEntry contains a contender, its name and its measured times.
type contenderEntry struct {
	side    string
	chain   contender
	samples map[string]*verbSample
	err     error
}

// The type verbSample contains the measured times of one verb, for the whole plugin chain and for each plugin process.
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

// runRounds measures all entries repeatedly. Every second repetition runs the entries in reverse order, so that the order favours no entry.
// If an entry fails, later repetitions omit this entry.
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

// runLap runs ADD, CHECK and DEL once and stores the times. DEL runs even if ADD or CHECK fails.
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

// countProcesses runs ADD, CHECK and DEL once without a time measurement, and counts the processes that the plugins start during each verb.
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

// The function percentile() returns the nearest-rank percentile of a non-empty slice of times.
func percentile(times []time.Duration, p int) time.Duration {
	sorted := slices.Clone(times)
	slices.Sort(sorted)
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

// pluginFolders contains the folder of Podlace's plugins and the folder of the reference plugins.
type pluginFolders struct{ plugins, reference string }

// The type nodes maps names to simulated nodes. Each node is a network namespace and belongs to one plugin set, so that plugin sets do not
// share bridges, rules and qdiscs.
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

// pluginChain returns the plugin chain `s` for one plugin set, on the node with the given name.
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

// makeEntries returns one benchmark entry for each plugin set, with the plugin chain `s`.
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
