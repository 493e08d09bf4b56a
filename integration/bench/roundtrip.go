// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/podlace/podlace/integration/meter"
)

const (
	greedyFlows  = 8
	pingPatience = time.Second
	manyLost     = 5.0 // percent; with more losses p95 is meaningless
)

// measureRoundTrips measures the round-trip time to a limited pod while its other traffic uses all of the limit.
func (r *report) measureRoundTrips(o options, n nodes) {
	above, lost := map[flowLane][]float64{}, map[flowLane][]float64{}
	for range o.repeats() {
		for _, side := range o.bothSides() {
			for _, direction := range directions() {
				idle, busy, err := n.roundTrips(side, direction, o)
				if err != nil {
					r.fail("round trips, "+side.name, err)
					return
				}
				way := flowLane{direction, side.name}
				above[way] = append(above[way], milliseconds(busy.P95-idle.P95))
				lost[way] = append(lost[way], 100*float64(busy.Lost)/float64(busy.Sent))
			}
		}
	}
	for _, direction := range directions() {
		sides := map[string]figure{}
		for _, side := range o.bothSides() {
			way := flowLane{direction, side.name}
			sides[side.name] = roundTrip(median(above[way]), median(lost[way]))
		}
		r.addLoad(fmt.Sprintf("round trip beside %d TCP flows %s at %d Mbit/s: p95 above that without", greedyFlows, direction,
			podRate/1_000_000), 0, sides)
	}
}

func roundTrip(above, lost float64) figure {
	f := figure{Value: above}
	if lost > manyLost {
		f.Note = fmt.Sprintf("at least %.0f, %.0f %% lost", above, lost)
	}
	return f
}

// roundTrips measures the round-trip time to a new pod twice: without other traffic, and while flows of one direction use the limit.
func (n nodes) roundTrips(side pluginSet, direction string, o options) (idle, busy meter.RoundTrips, err error) {
	c, err := n.limitChain("limit-"+side.name+"-0", "limit-"+side.name, side, podRate)
	if err != nil {
		return idle, busy, err
	}
	err = c.whileAttached(func() error {
		flow, err := c.flowOf(direction)
		if err != nil {
			return err
		}
		ping := flow
		ping.Duration, ping.Patience = time.Second, pingPatience
		if o.brief() {
			ping.Duration /= 2
		}
		if idle, err = meter.Ping(context.Background(), ping); err != nil {
			return err
		}
		if idle.Lost > 0 {
			return fmt.Errorf("%d of %d echo requests had no reply without other traffic", idle.Lost, idle.Sent)
		}
		flow.Protocol, flow.Streams, flow.Control = meter.TCP, greedyFlows, congestion
		busy, err = meter.PingBeside(context.Background(), ping, flow, drained)
		return err
	})
	return idle, busy, err
}
