// SPDX-License-Identifier: Apache-2.0

package podmetrics

import (
	"iter"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/kernel"
)

// traffic sums the counters of limits by network. The kernel forgets a limit's counters with the pod, but the sum must not decrease: rate()
// takes a decrease for a restart. It lacks what a limit counted after the last reading before its pod ended.
type traffic struct {
	last map[limit]kernel.Counters // nil before the first reading
	sums map[sum]*counted
}

// limit is one direction of an attachment.
type limit struct {
	attachment.Key
	direction string
}

// sum identifies a sum.
type sum struct{ network, direction string }

type counted struct{ sent, dropped uint64 }

// update adds what the limits have counted since the last reading. The first reading adds nothing: the limits may have counted for days.
func (t *traffic) update(list []bandwidth.Limits) {
	first := t.last == nil
	now := map[limit]kernel.Counters{}
	if t.sums == nil {
		t.sums = map[sum]*counted{}
	}
	for _, l := range list {
		for direction, d := range directions(l) {
			key := sum{l.Network, direction}
			if t.sums[key] == nil {
				t.sums[key] = &counted{}
			}
			if d.Applied == nil {
				continue
			}
			of := limit{l.Key, direction}
			now[of] = d.Applied.Counters
			if !first {
				t.sums[key].add(t.last[of], now[of])
			}
		}
	}
	t.last = now
}

// add adds the difference of two readings of one limit.
func (c *counted) add(was, is kernel.Counters) {
	if is.Sent < was.Sent || is.Dropped < was.Dropped { // the limit was recreated
		was = kernel.Counters{}
	}
	c.sent += is.Sent - was.Sent
	c.dropped += uint64(is.Dropped - was.Dropped)
}

func (t *traffic) addTo(v view) {
	for key, c := range t.sums {
		v.add(sent, float64(c.sent), key.network, key.direction)
		v.add(dropped, float64(c.dropped), key.network, key.direction)
	}
}

// directions yields the limited directions of an attachment.
func directions(l bandwidth.Limits) iter.Seq2[string, *bandwidth.Direction] {
	return func(yield func(string, *bandwidth.Direction) bool) {
		if l.Ingress != nil && !yield(ingress, l.Ingress) || l.Egress == nil {
			return
		}
		yield(egress, l.Egress)
	}
}
