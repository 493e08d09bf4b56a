// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// The default burst is what the rate allows in burstTime, so that a late timer does not lower the rate, but at least burstFrames full
// frames.
//
// A segment is a packet of up to 64 KiB. The kernel queues it whole if it fits into the burst, and otherwise splits it into frames
// (tbf_segment in net/sched/sch_tbf.c). That keeps queued packets small but costs CPU time, so it is acceptable only on slow links. The
// queue needs room for a few whole segments, because a shorter one would drop every segment.
const (
	burstTime      = 4 * time.Millisecond
	burstFrames    = 4
	defaultLatency = 10 * time.Millisecond
	queueFrames    = 16
	segment        = 64<<10 + overhead
	queueSegments  = 2
	header         = 14         // bytes of the Ethernet header: a queue counts a frame as MTU plus header
	overhead       = header + 4 // and a VLAN tag

	// maxBurstTime is the longest time that a burst may take at the rate: the kernel stores it as a 32-bit number of ticks of 64 ns.
	maxBurstTime = 274 * time.Second
)

// bucket returns the token bucket of the limit on a link with this MTU, or nil if the rate is zero. latency is the longest wait of a packet
// in the queue, unless the rate is so low that the shortest allowed queue takes longer. With a fair queue, packets wait only for those of
// their own flow.
func (l Limit) bucket(mtu int, latency time.Duration, fair bool) *kernel.Bucket {
	if l.Rate == 0 {
		return nil
	}
	frame := uint64(mtu + overhead)
	burst := l.Burst / 8
	if burst == 0 {
		burst = l.sentIn(burstTime)
	}
	burst = min(max(burst, burstFrames*frame), l.sentIn(maxBurstTime), maxBytes)
	queue := max(l.sentIn(latency), queueFrames*frame, queueSegments*min(burst, segment))
	// A queue full of whole frames must leave room for half a frame, or flows of whole frames would keep out small packets forever.
	counted := uint64(mtu + header)
	queue += max(queue%counted, counted/2) - queue%counted
	bucket := kernel.Bucket{Rate: l.Rate, Burst: uint32(burst), Limit: uint32(min(queue, maxBytes))}
	if fair {
		bucket.Fair = l.fairQueue(frame, latency)
	}
	return &bucket
}

// logBurst logs that a requested burst was clamped. A burst must hold a minimum number of full frames, and the kernel's clock must be able
// to represent the time that it takes at the rate.
func logBurst(r *plugin.Request, direction string, asked Limit, got *kernel.Bucket) {
	if got != nil && asked.Burst > 0 && asked.Burst/8 != uint64(got.Burst) {
		r.Log.Warn("burst, in bits, is out of bounds and was clamped", "direction", direction, "asked", asked.Burst,
			"applied", uint64(got.Burst)*8)
	}
}

// Parameters of a fair queue, an fq_codel qdisc. One waiting frame is no persistent queue, so CoDel must not drop the packet behind it: its
// target is at least the time of 1.5 frames. A flow without congestion control, such as unanswered UDP, can queue at most what the rate
// sends in one interval.
const (
	fairInterval   = 100 * time.Millisecond // the kernel's default, enough for any round trip on Earth
	fairMinPackets = 64
	fairMaxPackets = 10240 // the kernel's default
)

// fairQueue returns the parameters of a fair queue. CoDel's target, the wait after which it begins to drop, is half the latency; by default
// 5 ms, like the kernel's.
func (l Limit) fairQueue(frame uint64, latency time.Duration) kernel.FairQueue {
	oneAndAHalf := time.Duration(frame*12*1e6/l.Rate) * time.Microsecond // 1.5 frames of 8 bits per byte
	target := max(latency/2, oneAndAHalf)
	interval := max(fairInterval, 2*target)
	return kernel.FairQueue{Target: target, Interval: interval,
		Packets: uint32(min(max(l.sentIn(interval)/frame, fairMinPackets), fairMaxPackets))}
}

// sentIn returns the bytes that the rate allows in the given time. It cannot overflow, because maxRate times maxBurstTime is less than
// 2^62.
func (l Limit) sentIn(t time.Duration) uint64 { return l.Rate / 8 * uint64(t.Microseconds()) / 1e6 }
