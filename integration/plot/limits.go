// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/meter"
)

const (
	rate         = 20_000_000 // bit/s
	runtimeBurst = 1<<32 - 1  // what containerd sends when an annotation names a rate alone

	congestion  = "cubic" // the kernel's default: a machine with another one must not show other figures
	greedyFlows = 8
	settled     = 500 * time.Millisecond // slow start is over
	watched     = 2 * time.Second

	shown = 2 * time.Second
	step  = meter.Interval
)

// curve is what a flow brings into a pod with a burst, in megabits by the end of each step.
type curve struct {
	title, folder, burst string // an annotation; the runtime's own burst when empty
	megabits             [][]float64
}

func curves(o options) []*curve {
	all := []*curve{
		{title: "burst of 16 Mbit", folder: o.plugins, burst: "16M"},
		{title: "burst of 8 Mbit", folder: o.plugins, burst: "8M"},
		{title: "burst derived from the rate, the default", folder: o.plugins},
	}
	if o.reference != "" {
		all = append(all, &curve{title: "reference plugin, burst as containerd sends it", folder: o.reference})
	}
	return all
}

func (c *curve) measure() error {
	return withPod(limit{folder: c.folder, burst: c.burst}, func(p *pod) error {
		flow := p.flow(1)
		flow.Duration = shown + 2*step // what came by the very end may be seen too late
		result, err := meter.Run(context.Background(), flow)
		if err == nil {
			c.add(result.Arrivals)
		}
		return err
	})
}

func (c *curve) add(came meter.Arrivals) {
	if c.megabits == nil {
		c.megabits = make([][]float64, shown/step+1)
	}
	for i := range c.megabits {
		at := time.Duration(i) * step
		c.megabits[i] = append(c.megabits[i], came.Rate(0, at)*at.Seconds()/1e6)
	}
}

// point is what others wait behind greedy flows with a latency, in milliseconds, and how many of them wait in vain, in percent; and what part of
// the rate a flow alone gets, in percent.
type point struct {
	latency time.Duration
	folder  string
	fair    bool

	p50, p95, lost, goodput []float64
}

func points(o options) (all []*point) {
	for _, latency := range []time.Duration{2, 5, 10, 20, 50, 100} {
		all = append(all, &point{latency: latency * time.Millisecond, folder: o.plugins})
	}
	return all
}

func (p *point) measure() error {
	l := limit{folder: p.folder, latency: p.latency}
	err := withPod(l, func(pod *pod) error {
		p.fair = pod.shaper.Fair.Packets > 0
		ping := pod.flow(1)
		ping.Duration = watched
		seen, err := meter.PingBeside(context.Background(), ping, pod.flow(greedyFlows), settled)
		if err == nil {
			p.add(seen)
		}
		return err
	})
	if err != nil {
		return err
	}
	return withPod(l, func(pod *pod) error {
		flow := pod.flow(1)
		flow.Duration = settled + watched
		result, err := meter.Run(context.Background(), flow)
		p.goodput = append(p.goodput, 100*result.Arrivals.Rate(settled, flow.Duration)/rate)
		return err
	})
}

// add looks at what was answered alone: where flows share a queue, much is lost that finds it full, and that can be all.
func (p *point) add(seen meter.RoundTrips) {
	p.lost = append(p.lost, 100*float64(seen.Lost)/float64(seen.Sent))
	if sorted := slices.Sorted(slices.Values(seen.Samples)); len(sorted) > 0 {
		at := func(percent int) float64 { return 1e3 * sorted[(len(sorted)*percent+99)/100-1].Seconds() } // nearest rank
		p.p50, p.p95 = append(p.p50, at(50)), append(p.p95, at(95))
	}
}
