// SPDX-License-Identifier: Apache-2.0

package podmetrics

import (
	"iter"
	"math"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/kernel"
)

// trafficSums adds up the counters of each network's bandwidth limits. When a pod ends, the kernel forgets its counters, but the sum must
// not decrease, because PromQL's rate would see a restart. Packets between the last reading and the end of a pod are lost to it.
type trafficSums struct {
	last map[limitKey]kernel.Counters // nil before the first reading
	sums map[sum]*counted
}

// limitKey identifies one direction of an attachment.
type limitKey struct {
	attachment.Key
	direction string
}

// sum identifies the counters of one network and direction.
type sum struct{ network, direction string }

type counted struct{ sent, dropped uint64 }

// update adds what each limit counted since the previous reading to the sum of its network. The first reading adds nothing, because the
// counter may hold the packets of many days.
func (t *trafficSums) update(list []bandwidth.Limits) {
	first := t.last == nil
	now := map[limitKey]kernel.Counters{}
	if t.sums == nil {
		t.sums = map[sum]*counted{}
	}
	for _, l := range list {
		for direction, d := range limitedDirections(l) {
			key := sum{l.Network, direction}
			if t.sums[key] == nil {
				t.sums[key] = &counted{}
			}
			if d.Applied == nil {
				continue
			}
			of := limitKey{l.Key, direction}
			now[of] = d.Applied.Counters
			if !first {
				t.sums[key].addDifference(t.last[of], now[of])
			}
		}
	}
	t.last = now
}

// addDifference adds the difference between two readings of one limit.
func (c *counted) addDifference(was, is kernel.Counters) {
	overflow := was.Dropped > math.MaxUint32/2                       // of the kernel's 32 bits
	if is.Sent < was.Sent || is.Dropped < was.Dropped && !overflow { // the limit was recreated
		was = kernel.Counters{}
	}
	c.sent += is.Sent - was.Sent
	c.dropped += uint64(is.Dropped - was.Dropped)
}

func (t *trafficSums) addTo(v metricValues) {
	for key, c := range t.sums {
		v.add(sent, float64(c.sent), key.network, key.direction)
		v.add(dropped, float64(c.dropped), key.network, key.direction)
	}
}

// limitedDirections returns the directions of an attachment that have a limit.
func limitedDirections(l bandwidth.Limits) iter.Seq2[string, *bandwidth.Direction] {
	return func(yield func(string, *bandwidth.Direction) bool) {
		if l.Ingress != nil && !yield(ingress, l.Ingress) || l.Egress == nil {
			return
		}
		yield(egress, l.Egress)
	}
}
