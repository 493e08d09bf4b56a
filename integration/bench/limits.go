// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/podlace/podlace/integration/meter"
)

const (
	groupShaping = "shaping"

	limitSubnet  = "10.99.0.0/16"
	congestion   = "cubic" // the kernel's default, so that the figures do not depend on the machine's setting
	slowRate     = 10e6    // up to this rate, parallel flows do not compete for processors
	overload     = 2       // ratio of offered UDP to the limit
	limitRepeats = 3
	fewRounds    = 10 // a run with fewer rounds omits slow measurements

	// drained is how long the reference plugin takes to send the half gigabyte that a runtime passes as burst. Then the traffic has the rate
	// of the limit.
	drained = 1200 * time.Millisecond
)

// permittedShare is a range of throughput in percent of the limit.
type permittedShare struct{ least, most float64 }

func shareOfFirst() permittedShare  { return permittedShare{0, 111} } // with 10 ms of burst
func shareOfPeak() permittedShare   { return permittedShare{0, 150} }
func shareOfSteady() permittedShare { return permittedShare{95, 101} }

func (o options) brief() bool { return o.rounds < fewRounds }

func (o options) repeats() int { return max(1, min(limitRepeats, o.rounds/fewRounds)) }

type limitedFlow struct {
	rate     float64
	protocol meter.Protocol
	streams  int
	brief    bool // measured in a brief run too
	first    bool // its first interval has rows
	costs    bool // its cost has rows

	mu   sync.Mutex
	seen map[flowLane]*passedShares
}

// flowLane is a direction of traffic with one plugin set.
type flowLane struct{ direction, side string }

// passedShares are throughputs on the wire in percent of the limit. cost is the processor time in milliseconds per gigabit.
type passedShares struct{ first, peak, steady, cost []float64 }

func limits() []*limitedFlow {
	return []*limitedFlow{
		{rate: 1e6, protocol: meter.TCP, streams: 1, brief: true},
		{rate: 1e6, protocol: meter.TCP, streams: 8},
		{rate: 10e6, protocol: meter.TCP, streams: 1, brief: true, first: true},
		{rate: 10e6, protocol: meter.TCP, streams: 8},
		{rate: 10e6, protocol: meter.UDP, streams: 1, brief: true},
		{rate: 100e6, protocol: meter.TCP, streams: 1, brief: true, first: true},
		{rate: 100e6, protocol: meter.TCP, streams: 8},
		{rate: 1e9, protocol: meter.TCP, streams: 1, brief: true, costs: true},
		{rate: 1e9, protocol: meter.TCP, streams: 8},
	}
}

func (l *limitedFlow) String() string { return fmt.Sprintf("%g Mbit/s", l.rate/1e6) }

func (l *limitedFlow) what() string {
	what := fmt.Sprintf("%v, %s", l, strings.ToUpper(string(l.protocol)))
	if l.streams > 1 {
		what += fmt.Sprintf(", %d flows", l.streams)
	}
	return what
}

// steadyTime returns how long to measure after the burst. A short time would be inaccurate for slow limits, because 100 ms of data pass at
// once after a pause, and for processor time, which the kernel counts in units of 10 ms.
func (l *limitedFlow) steadyTime(o options) time.Duration {
	long := l.costs || l.rate < slowRate
	switch {
	case o.brief() && !long:
		return 3 * meter.Interval
	case !o.brief() && long:
		return 20 * meter.Interval
	default:
		return 10 * meter.Interval
	}
}

// measureLimits measures flows into and out of limited pods that have the burst of a runtime.
func (r *report) measureLimits(o options, n nodes) {
	all := slices.DeleteFunc(limits(), func(l *limitedFlow) bool { return o.brief() && !l.brief })
	sides := o.bothSides()
	for range o.repeats() {
		for _, l := range all {
			for _, side := range sides {
				if err := n.bothWays(l, side, l.steadyTime(o)); err != nil {
					r.fail(fmt.Sprintf("limit of %s, %s", l.what(), side.name), err)
				}
			}
		}
		slices.Reverse(sides)
	}
	for _, l := range all {
		r.addBeginning(l)
	}
	for _, l := range all {
		r.addLimit(l.what(), shareOfSteady(), l.medians(func(p *passedShares) []float64 { return p.steady }))
		r.addCosts(l)
	}
}

func (r *report) addBeginning(l *limitedFlow) {
	if l.first {
		r.addLimit(l.String()+", first second", shareOfFirst(), l.medians(func(p *passedShares) []float64 { return p.first }))
		r.addLimit(l.String()+", largest 100 ms", shareOfPeak(), l.medians(func(p *passedShares) []float64 { return p.peak }))
	}
}

func (r *report) addCosts(l *limitedFlow) {
	costs := l.medians(func(p *passedShares) []float64 { return p.cost })
	for _, direction := range directions() {
		if l.costs {
			r.addLoad(fmt.Sprintf("CPU for a gigabit %s, limit %v", direction, l), 0, costs.ofDirection(direction))
		}
	}
}

// bothWays measures the limits of a receiving and a sending pod. Both are new, because the token bucket of an older pod may be empty.
func (n nodes) bothWays(l *limitedFlow, side pluginSet, steady time.Duration) error {
	var chains []*chain
	for i := range directions() {
		c, err := n.limitChain(fmt.Sprintf("limit-%s-%d", side.name, i), "limit-"+side.name, side, l.rate)
		if err != nil {
			return err
		}
		chains = append(chains, c)
	}
	return chains[0].whileAttached(func() error {
		return chains[1].whileAttached(func() error {
			errs := make([]error, len(chains))
			var group sync.WaitGroup
			for i, direction := range directions() {
				group.Go(func() { errs[i] = l.measureFlow(chains[i], flowLane{direction, side.name}, steady) })
				if l.rate > slowRate {
					group.Wait()
				}
			}
			group.Wait()
			return errors.Join(errs...)
		})
	})
}

// limitChain returns a chain of bridge and bandwidth with a limit in both directions.
func (n nodes) limitChain(name, network string, side pluginSet, rate float64) (*chain, error) {
	c, err := n.chainOf(name, "node-"+network, side, pluginConf{
		"type": "bridge", "bridge": "br-limit", "isDefaultGateway": true,
		"ipam": map[string]any{"type": "host-local", "ranges": [][]map[string]any{{{"subnet": limitSubnet}}}},
	}, bandwidthPlugin())
	if err != nil {
		return nil, err
	}
	c.network, c.args = network, map[string]any{"bandwidth": annotatedLimits(uint64(rate))}
	return c, nil
}

func (l *limitedFlow) measureFlow(c *chain, way flowLane, steady time.Duration) error {
	flow, err := c.flowOf(way.direction)
	if err != nil {
		return err
	}
	flow.Protocol, flow.Streams, flow.Control, flow.Rate = l.protocol, l.streams, congestion, overload*l.rate
	flow.Duration = drained + steady
	spent := startSpending(drained)
	result, err := meter.Run(context.Background(), flow)
	if err != nil {
		return fmt.Errorf("%s: %w", way.direction, err)
	}
	cost, err := spent()
	if err != nil {
		return err
	}
	l.addArrivals(way, result.Arrivals, flow.Duration, cost)
	return nil
}

// addArrivals stores a flow's throughput, and the processor time of its traffic after the burst.
func (l *limitedFlow) addArrivals(way flowLane, came meter.Arrivals, end, cost time.Duration) {
	percent := func(rate float64) float64 { return rate / l.rate * 100 }
	rate := came.Rate(drained, end)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.seen == nil {
		l.seen = map[flowLane]*passedShares{}
	}
	if l.seen[way] == nil {
		l.seen[way] = &passedShares{}
	}
	p := l.seen[way]
	p.first = append(p.first, percent(came.Rate(0, time.Second)))
	p.peak = append(p.peak, percent(came.Peak()))
	p.steady = append(p.steady, percent(rate))
	if rate > 0 && cost > 0 {
		p.cost = append(p.cost, milliseconds(cost)/(rate*(end-drained).Seconds()/1e9))
	}
}

func (l *limitedFlow) medians(pick func(*passedShares) []float64) figuresByLane {
	out := figuresByLane{}
	for way, p := range l.seen {
		if values := pick(p); len(values) > 0 {
			out[way] = median(values)
		}
	}
	return out
}
